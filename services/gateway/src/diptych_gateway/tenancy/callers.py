"""Who asks, as the rest of the gateway sees it."""

from dataclasses import dataclass

from diptych_contracts.keys import DEFAULT_TENANT, RateLimits, Role


@dataclass(frozen=True, slots=True)
class Holder:
    """A key or a tenant that has limits."""

    name: str
    """Its key in bucket `keys`, and of its record in bucket `allowances`."""
    limits: RateLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. `scope["state"]["caller"]`; its tenant is `scope["state"]["tenant"]`."""

    tenant: str = DEFAULT_TENANT
    key_id: str = ""
    """Empty: without a key."""
    role: Role | None = None
    """None: without a key."""
    sha256: str = ""
    """Of its key."""
    holders: tuple[Holder, ...] = ()
    """Whose limits hold for it."""
    anonymous: bool = False
    """It showed no key; one without a key that is not anonymous asks from inside, for its tenant
    (a line of a batch)."""


ANONYMOUS = Caller(anonymous=True)

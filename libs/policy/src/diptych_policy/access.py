"""Who may do what: roles, the standing of a key, and whether a gateway serves without keys."""

from enum import Enum, auto
from ipaddress import ip_address

from diptych_contracts.keys import ApiKey, Role, Tenant


class Right(Enum):
    """What is asked for."""

    LIST = auto()
    """See which models there are."""
    ASK = auto()
    """Have a model answer, and read and delete the tenant's own answers."""
    LOOK = auto()
    """See the fleet: metrics, the console."""
    OPERATE = auto()
    """Drain, scale, set power."""
    ADMINISTER = auto()
    """Keys, tenants, configuration."""


_RIGHTS: dict[Role | None, frozenset[Right]] = {
    None: frozenset({Right.LIST, Right.ASK, Right.LOOK}),
    Role.USER: frozenset({Right.LIST, Right.ASK}),
    Role.VIEWER: frozenset({Right.LIST, Right.LOOK}),
    Role.OPERATOR: frozenset({Right.LIST, Right.ASK, Right.LOOK, Right.OPERATE}),
    Role.ADMIN: frozenset(Right),
}


def may(role: Role | None, right: Right) -> bool:
    """Whether a key of `role` gives `right`; None: no key, where that is served."""
    return right in _RIGHTS[role]


class Standing(Enum):
    """Whether a key counts."""

    GOOD = auto()
    REVOKED = auto()
    EXPIRED = auto()
    PURGED = auto()
    """Its tenant is no more."""


def standing(key: ApiKey, tenant: Tenant | None, *, now_unix_ms: int) -> Standing:
    """How a key stands; `tenant` is what is known of its tenant, if anything is."""
    if tenant is not None and tenant.purged_unix_ms:
        return Standing.PURGED
    if key.revoked_unix_ms:
        return Standing.REVOKED
    if key.expires_unix_ms and now_unix_ms >= key.expires_unix_ms:
        return Standing.EXPIRED
    return Standing.GOOD


def anonymous(*, keys: int, loopback: bool, allowed: bool) -> bool:
    """Whether requests without a key are served.

    One key, revoked or expired, is enough to close the door: taking the last one away must not open
    it.

    Args:
        keys: How many keys there are, counting or not.
        loopback: Whether only this machine reaches the gateway.
        allowed: Whether its operator said that anybody may.
    """
    return not keys and (loopback or allowed)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False

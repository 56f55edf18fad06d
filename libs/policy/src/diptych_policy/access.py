"""Who may do what: roles, the standing of a key, and whether a gateway serves without keys.

`docs/security.md` shows the table; a test holds it to this one.
"""

from enum import Enum, auto
from ipaddress import ip_address

from diptych_contracts.audit import Action
from diptych_contracts.keys import ApiKey, Role, Tenant


class Right(Enum):
    """What is asked for."""

    LIST = auto()
    """See which models there are."""
    ASK = auto()
    """Have a model answer, and read and delete the tenant's own answers."""
    LOOK = auto()
    """See the fleet: metrics, the console."""
    ACCOUNT = auto()
    """See what tenants used."""
    OPERATE = auto()
    """Drain, scale, set power, try dead requests again."""
    ADMINISTER = auto()
    """Keys, tenants, configuration, the audit, and what people wrote."""


_RIGHTS: dict[Role | None, frozenset[Right]] = {
    None: frozenset({Right.LIST, Right.ASK, Right.LOOK}),
    Role.USER: frozenset({Right.LIST, Right.ASK}),
    Role.VIEWER: frozenset({Right.LIST, Right.LOOK, Right.ACCOUNT}),
    Role.OPERATOR: frozenset({Right.LIST, Right.ASK, Right.LOOK, Right.ACCOUNT, Right.OPERATE}),
    Role.ADMIN: frozenset(Right),
}
_TAKES: dict[Action, Right] = {
    Action.KEYS_READ: Right.ADMINISTER,
    Action.KEYS_CREATE: Right.ADMINISTER,
    Action.KEYS_REVOKE: Right.ADMINISTER,
    Action.KEYS_FORGET: Right.ADMINISTER,
    Action.TENANTS_READ: Right.ADMINISTER,
    Action.TENANTS_LIMIT: Right.ADMINISTER,
    Action.TENANTS_PURGE: Right.ADMINISTER,
    Action.USAGE_READ: Right.ACCOUNT,
    Action.AUDIT_READ: Right.ADMINISTER,
    Action.DEAD_PROMPT: Right.ADMINISTER,
    Action.DEAD_RETRY: Right.OPERATE,
    Action.FLEET_SCALE: Right.OPERATE,
}


def may(role: Role | None, right: Right) -> bool:
    """Whether a key of `role` gives `right`; None: no key, where that is served."""
    return right in _RIGHTS[role]


def right_of(action: Action) -> Right:
    """What a key must give for an audited action."""
    return _TAKES[action]


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


def closes(entry: ApiKey | Tenant) -> bool:
    """Whether an entry of bucket `keys` closes the door to those without a key.

    A key does, revoked or expired, and so does a purged tenant, whose keys are gone: taking the
    last one away must not open it.
    """
    return isinstance(entry, ApiKey) or entry.purged_unix_ms > 0


def anonymous(*, keys: int, loopback: bool, allowed: bool) -> bool:
    """Whether requests without a key are served.

    Args:
        keys: How many entries there are that close the door (`closes`).
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

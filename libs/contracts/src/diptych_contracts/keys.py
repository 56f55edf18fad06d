"""API keys and tenants: bucket `keys`, what every gateway watches.

A key is 256 random bits, so a plain SHA-256 keeps it: nobody guesses one, and a slow hash would
only slow the gateways. The key itself is printed once, where it is made, and stored nowhere.
"""

import re
from enum import StrEnum
from hashlib import sha256

from diptych_contracts.wire import Message

DEFAULT_TENANT = "default"
"""Whose requests those without a key are."""
KEY_PREFIX = "dk-"
SHOWN_CHARS = 7
"""How much of a key may be shown: its prefix and 24 of its 256 bits."""
_TENANT = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?")


class Role(StrEnum):
    """What a key is for; `policy.access` says what each may do."""

    USER = "user"
    """Asks models."""
    VIEWER = "viewer"
    """Looks: metrics, the console."""
    OPERATOR = "operator"
    """Looks, asks, and runs the fleet: drain, power, scale."""
    ADMIN = "admin"
    """Everything, keys and tenants included."""


class RateLimits(Message, frozen=True, kw_only=True, tag="rate_limits.1"):
    """What a key, or all keys of a tenant together, may take; None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    concurrency: int | None = None
    """Requests at once."""

    @property
    def unlimited(self) -> bool:
        """Whether nothing is limited."""
        return self == UNLIMITED


UNLIMITED = RateLimits()


class ApiKey(Message, frozen=True, kw_only=True, tag="api_key.1"):
    """Who may ask: bucket `keys`, key = `key.<key_id>`."""

    key_id: str
    sha256: str
    """Of the whole key, in hex."""
    shown: str
    """How the key begins, so that its holder recognizes it."""
    tenant: str = DEFAULT_TENANT
    name: str = ""
    role: Role = Role.USER
    created_unix_ms: int
    created_by: str = ""
    """Who made it: user and host of the command, for the audit."""
    expires_unix_ms: int = 0
    """0: never."""
    revoked_unix_ms: int = 0
    """0: it is not."""
    limits: RateLimits = UNLIMITED


class Tenant(Message, frozen=True, kw_only=True, tag="tenant.1"):
    """What holds for all keys of a tenant: bucket `keys`, key = `tenant.<tenant>`."""

    tenant: str
    created_unix_ms: int
    limits: RateLimits = UNLIMITED
    purged_unix_ms: int = 0
    """Since when none of its keys counts; 0: they do."""


KeyEntry = ApiKey | Tenant
"""Everything bucket `keys` may hold."""


def digest(key: str) -> str:
    """What is stored of a key."""
    return sha256(key.encode()).hexdigest()


def key_entry(key_id: str) -> str:
    """Where bucket `keys` holds a key."""
    return f"key.{key_id}"


def tenant_entry(tenant: str) -> str:
    """Where bucket `keys` holds a tenant."""
    return f"tenant.{tenant}"


def is_tenant(name: str) -> bool:
    """Whether `name` may be a tenant's: it stands in keys of buckets and in names of metrics."""
    return _TENANT.fullmatch(name) is not None

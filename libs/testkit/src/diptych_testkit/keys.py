"""API keys for tests: put into the bucket as the command line does."""

from typing import Any, cast

from diptych_bus.port import Bucket, Bus
from diptych_contracts.keys import (
    SHOWN_CHARS,
    ApiKey,
    KeyEntry,
    RateLimits,
    Tenant,
    digest,
    key_entry,
    tenant_entry,
)
from diptych_contracts.streams import KEYS


def keys_bucket(bus: Bus) -> Bucket[KeyEntry]:
    """Bucket `keys`."""
    return bus.bucket(KEYS, cast("type[KeyEntry]", cast(Any, KeyEntry)))


async def put_key(bus: Bus, key_id: str, **changes: Any) -> str:
    """Make or change key `key_id`; gives the key itself."""
    secret = f"dk-{key_id}-0123456789abcdefghijklmnopqrstuvwxyz"
    key = ApiKey(
        **{
            "key_id": key_id,
            "sha256": digest(secret),
            "shown": secret[:SHOWN_CHARS],
            "created_unix_ms": 1,
            **changes,
        }
    )
    await keys_bucket(bus).put(key_entry(key_id), key)
    return secret


async def put_tenant(bus: Bus, tenant: str, limits: RateLimits, **changes: Any) -> None:
    """Make or change a tenant."""
    made = Tenant(tenant=tenant, created_unix_ms=1, limits=limits, **changes)
    await keys_bucket(bus).put(tenant_entry(tenant), made)


def bearer(key: str) -> dict[str, str]:
    """The header that shows `key`."""
    return {"Authorization": f"Bearer {key}"}

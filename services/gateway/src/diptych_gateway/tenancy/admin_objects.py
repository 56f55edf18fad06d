"""What `/admin/v1` says of keys, tenants, usage and the audit. Times are seconds since 1970."""

from typing import Literal

import msgspec

from diptych_contracts.audit import Audited
from diptych_contracts.keys import ApiKey, RateLimits, Tenant
from diptych_contracts.usage import UsageDay
from diptych_policy.access import Standing


class LimitsObject(msgspec.Struct, kw_only=True):
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrency: int | None


class KeyObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["api_key"] = "api_key"
    shown: str
    tenant: str
    name: str
    role: str
    state: str
    limits: LimitsObject
    created_at: int
    created_by: str
    expires_at: int | None
    revoked_at: int | None


class KeyList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[KeyObject]


class TenantObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["tenant"] = "tenant"
    keys: int
    limits: LimitsObject
    state: str
    purged_at: int | None


class TenantList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[TenantObject]


class UsageObject(msgspec.Struct, kw_only=True):
    object: Literal["usage.day"] = "usage.day"
    day: str
    tenant: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    kv_token_s: float
    prefill_j: float
    decode_j: float
    sim_j: float


class UsageList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[UsageObject]


class AuditObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["audit.action"] = "audit.action"
    at: int
    actor: str
    door: str
    action: str
    subject: str
    outcome: str
    detail: str


class AuditList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[AuditObject]


def key_object(key: ApiKey, stands: Standing) -> KeyObject:
    """A key, so far as it may be told: never its hash."""
    return KeyObject(
        id=key.key_id,
        shown=f"{key.shown}…",
        tenant=key.tenant,
        name=key.name,
        role=key.role,
        state="active" if stands is Standing.GOOD else stands.name.lower(),
        limits=_limits(key.limits),
        created_at=key.created_unix_ms // 1000,
        created_by=key.created_by,
        expires_at=_at(key.expires_unix_ms),
        revoked_at=_at(key.revoked_unix_ms),
    )


def tenant_object(tenant: Tenant, keys: int) -> TenantObject:
    """A tenant with its number of keys."""
    return TenantObject(
        id=tenant.tenant,
        keys=keys,
        limits=_limits(tenant.limits),
        state="purged" if tenant.purged_unix_ms else "active",
        purged_at=_at(tenant.purged_unix_ms),
    )


def usage_object(day: UsageDay) -> UsageObject:
    """A tenant's day."""
    used = {name: getattr(day.used, name) for name in day.used.__struct_fields__}
    return UsageObject(day=day.day, tenant=day.tenant, **used)


def audit_object(entry: Audited) -> AuditObject:
    """An action with what became of it."""
    return AuditObject(
        id=entry.audit_id,
        at=entry.unix_ms // 1000,
        actor=entry.actor,
        door=entry.door,
        action=entry.action,
        subject=entry.object,
        outcome=entry.outcome,
        detail=entry.detail,
    )


def _limits(limits: RateLimits) -> LimitsObject:
    return LimitsObject(**{name: getattr(limits, name) for name in LimitsObject.__struct_fields__})


def _at(unix_ms: int) -> int | None:
    return unix_ms // 1000 if unix_ms else None

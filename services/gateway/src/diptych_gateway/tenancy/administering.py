"""`/admin/v1`: what an administrator may look at over HTTP. It changes nothing.

Whoever could write bucket `keys` could make himself a key: gateways face the network and have no
such right. Keys and tenants are changed by `diptych keys` and `diptych tenants`, with the
operator's own identity on the bus.
"""

from datetime import date
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from diptych_bus.port import Bus, Gone, Kept
from diptych_contracts import subjects
from diptych_contracts.audit import Action, Audited, Outcome
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.keys import ApiKey, Tenant
from diptych_contracts.streams import AUDIT, USAGE
from diptych_contracts.usage import UsageDay, UsageEntry
from diptych_gateway.listening.reading import JSON
from diptych_gateway.tenancy.admin_objects import (
    AuditList,
    KeyList,
    TenantList,
    UsageList,
    audit_object,
    key_object,
    tenant_object,
    usage_object,
)
from diptych_gateway.tenancy.auditing import Auditing
from diptych_gateway.tenancy.callers import Caller
from diptych_gateway.tenancy.keyring import Keyring
from diptych_policy.access import Right, right_of
from diptych_policy.audit import about, folded

PREFIX = "/admin/"
ROUTES = {
    "/admin/v1/keys": Action.KEYS_READ,
    "/admin/v1/tenants": Action.TENANTS_READ,
    "/admin/v1/usage": Action.USAGE_READ,
    "/admin/v1/audit": Action.AUDIT_READ,
}


def admin_right(path: str) -> Right | None:
    """The right that a path of administration takes; None: it is none."""
    if not path.startswith(PREFIX):
        return None
    action = ROUTES.get(path)
    return Right.ADMINISTER if action is None else right_of(action)


class Administering:
    """The handlers.

    Args:
        bus: Where books and audit are.
        keyring: Knows keys and tenants.
        auditing: Writes down who looked, and who was not let.
    """

    def __init__(self, bus: Bus, keyring: Keyring, auditing: Auditing) -> None:
        self._bus = bus
        self._keyring = keyring
        self._auditing = auditing

    def routes(self) -> list[BaseRoute]:
        """One for each path of `ROUTES`."""
        handlers = {
            Action.KEYS_READ: self._keys,
            Action.TENANTS_READ: self._tenants,
            Action.USAGE_READ: self._usage,
            Action.AUDIT_READ: self._audit,
        }
        return [Route(path, handlers[action]) for path, action in ROUTES.items()]

    async def denied(self, caller: Caller, path: str) -> None:
        """A caller was refused `path`."""
        if (action := ROUTES.get(path)) is not None:
            await self._auditing.note(caller, action, Outcome.REFUSED)

    async def _keys(self, request: Request) -> Response:
        await self._done(request)
        keys = [entry for entry in self._keyring.entries if isinstance(entry, ApiKey)]
        return _json(KeyList(data=[key_object(key, self._keyring.stands(key)) for key in keys]))

    async def _tenants(self, request: Request) -> Response:
        await self._done(request)
        entries = self._keyring.entries
        records = {entry.tenant: entry for entry in entries if isinstance(entry, Tenant)}
        keys = [entry.tenant for entry in entries if isinstance(entry, ApiKey)]
        data = [
            tenant_object(
                records.get(name) or Tenant(tenant=name, created_unix_ms=0), keys.count(name)
            )
            for name in sorted({*records, *keys})
        ]
        return _json(TenantList(data=data))

    async def _usage(self, request: Request) -> Response:
        tenant, since = request.query_params.get("tenant"), request.query_params.get("since")
        if since is not None:
            _check_day(since)
        await self._done(request)
        days = [
            day
            for day in await self._days()
            if tenant in (None, day.tenant) and (since is None or day.day >= since)
        ]
        return _json(UsageList(data=[usage_object(day) for day in days]))

    async def _audit(self, request: Request) -> Response:
        await self._done(request)
        stored = self._bus.all_stored(AUDIT.name, subject=subjects.AUDITS)
        entries: list[Audited] = [item.delivery.decode(Audited) async for item in stored]
        query = request.query_params
        found = about(folded(entries), actor=query.get("actor", ""), action=query.get("action", ""))
        return _json(AuditList(data=[audit_object(entry) for entry in found]))

    async def _done(self, request: Request) -> None:
        action = ROUTES[request.url.path]
        await self._auditing.note(request.state.caller, action, Outcome.DONE)

    async def _days(self) -> list[UsageDay]:
        found: dict[str, UsageDay] = {}

        def hear(change: Kept[UsageEntry] | Gone) -> None:
            if not isinstance(change, Gone) and isinstance(change.value, UsageDay):
                found[change.key] = change.value

        bucket = self._bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry)))
        watch = await bucket.watch(hear)
        await watch.close()
        return [found[key] for key in sorted(found)]


def _check_day(text: str) -> None:
    try:
        date.fromisoformat(text)
    except ValueError as err:
        said = f"'since': expected a day as 2026-01-31, saw {text[:40]!r}"
        raise InvalidRequest(said, param="since") from err


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)

"""`/admin/v1`: who may look, what is told, and that it is written down."""

import asyncio
from typing import Any

import pytest

from diptych_contracts import subjects
from diptych_contracts.audit import Audited
from diptych_contracts.keys import RateLimits, Role
from diptych_contracts.streams import AUDIT, USAGE
from diptych_contracts.usage import UsageDay, Used, usage_key
from diptych_gateway.tenancy.administering import ROUTES
from diptych_testkit.keys import bearer, put_key, put_tenant

ALL = tuple(ROUTES)
USAGE_PATH = "/admin/v1/usage"


async def known(stack: Any, key: str) -> None:
    async def is_known() -> bool:
        answer = await stack.client.get("/v1/models", headers=bearer(key))
        return bool(answer.status_code == 200)

    await stack.until(is_known)


async def keys_of(stack: Any) -> dict[Role, str]:
    made = {
        role: await put_key(stack.fleet.bus, f"k{role}", role=role, tenant="acme") for role in Role
    }
    for key in made.values():
        await known(stack, key)
    return made


async def get(stack: Any, path: str, key: str) -> Any:
    return await stack.client.get(path, headers=bearer(key))


async def audit_of(stack: Any) -> list[tuple[str, str, str]]:
    stored = stack.fleet.bus.all_stored(AUDIT.name, subject=subjects.AUDITS)
    entries: list[Audited] = [item.delivery.decode(Audited) async for item in stored]
    return [(entry.actor, entry.action, entry.outcome) for entry in entries]


@pytest.mark.parametrize("path", ALL)
async def test_without_a_key_nobody_looks_even_where_anybody_is_served(
    stack: Any, path: str
) -> None:
    answer = await stack.client.get(path)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert (await stack.client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("path", ALL)
async def test_the_role_decides(stack: Any, path: str) -> None:
    keys = await keys_of(stack)
    allowed = {role for role in Role if (await get(stack, path, keys[role])).status_code == 200}
    usual = {Role.ADMIN}
    assert allowed == (usual | {Role.VIEWER, Role.OPERATOR} if path == USAGE_PATH else usual)
    refusal = await get(stack, path, keys[Role.USER])
    assert refusal.status_code == 403
    assert refusal.json()["error"]["code"] == "forbidden"
    for method in ("POST", "DELETE", "PUT"):
        answer = await stack.client.request(method, path, headers=bearer(keys[Role.ADMIN]))
        assert answer.status_code == 405


async def test_keys_are_told_without_what_makes_them_work(stack: Any) -> None:
    keys = await keys_of(stack)
    answer = await get(stack, "/admin/v1/keys", keys[Role.ADMIN])
    told = {key["id"]: key for key in answer.json()["data"]}
    assert set(told) == {f"k{role}" for role in Role}
    assert told["kviewer"]["role"] == "viewer"
    assert told["kviewer"]["state"] == "active"
    assert not [key for key in keys.values() if key in answer.text]
    assert "sha256" not in answer.text


async def test_tenants_with_their_keys_limits_and_ends(stack: Any) -> None:
    admin = (await keys_of(stack))[Role.ADMIN]
    await put_tenant(stack.fleet.bus, "gone", RateLimits(concurrency=3), purged_unix_ms=5000)

    async def told() -> Any:
        answer = await get(stack, "/admin/v1/tenants", admin)
        return {tenant["id"]: tenant for tenant in answer.json()["data"]}

    async def both() -> bool:
        return len(await told()) == 2

    await stack.until(both)
    found = await told()
    assert (found["acme"]["keys"], found["acme"]["state"]) == (4, "active")
    assert (found["gone"]["state"], found["gone"]["purged_at"]) == ("purged", 5)
    assert found["gone"]["limits"]["concurrency"] == 3


async def test_usage_is_told_by_tenant_and_day(stack: Any) -> None:
    admin = (await keys_of(stack))[Role.ADMIN]
    bucket = stack.fleet.bus.bucket(USAGE, UsageDay)
    for day, tenant in (("2026-01-01", "acme"), ("2026-01-02", "acme"), ("2026-01-02", "other")):
        used = Used(requests=2, decode_j=3.0, sim_j=3.0)
        made = UsageDay(tenant=tenant, day=day, used=used, upto_seq=1)
        await bucket.put(usage_key(day, tenant), made)
    everything = (await get(stack, USAGE_PATH, admin)).json()["data"]
    assert [(d["day"], d["tenant"], d["requests"]) for d in everything] == [
        ("2026-01-01", "acme", 2),
        ("2026-01-02", "acme", 2),
        ("2026-01-02", "other", 2),
    ]
    assert everything[0]["sim_j"] == 3.0
    some = await get(stack, f"{USAGE_PATH}?tenant=acme&since=2026-01-02", admin)
    assert [d["day"] for d in some.json()["data"]] == ["2026-01-02"]
    wrong = await get(stack, f"{USAGE_PATH}?since=yesterday", admin)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since")


async def test_who_looked_and_who_was_not_let_is_written_down_once_a_minute(stack: Any) -> None:
    keys = await keys_of(stack)
    for _ in range(3):
        assert (await get(stack, "/admin/v1/keys", keys[Role.ADMIN])).status_code == 200
        assert (await get(stack, "/admin/v1/audit", keys[Role.USER])).status_code == 403
    await asyncio.sleep(0)
    assert await audit_of(stack) == [
        ("key:kadmin", "keys.read", "done"),
        ("key:kuser", "audit.read", "refused"),
    ]
    told = (await get(stack, "/admin/v1/audit?action=audit", keys[Role.ADMIN])).json()["data"]
    assert [(t["actor"], t["outcome"], t["door"]) for t in told] == [
        ("key:kuser", "refused", "http"),
        ("key:kadmin", "done", "http"),
    ]

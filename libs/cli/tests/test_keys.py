"""`diptych keys`, `tenants` and `usage` on a memory bus."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_cli import commands, identities
from diptych_contracts.keys import ApiKey, RateLimits, Tenant, digest, key_entry
from diptych_contracts.streams import USAGE
from diptych_contracts.usage import UsageDay, UsageEntry, Used, usage_key

URL = ("--nats-url", "nats://nowhere")


class Stack:
    """A broker that a command finds instead of a stack's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.broker = MemoryBroker()
        self._capsys = capsys
        monkeypatch.setattr(identities, "joined", self.joined)

    @asynccontextmanager
    async def joined(self, _url: str) -> AsyncIterator[MemoryBus]:
        bus = self.broker.connect("cli")
        yield bus
        await bus.close()

    def ask(self, *arguments: str) -> tuple[int, str, str]:
        """A command's exit code, output and errors."""
        code = commands.main([*arguments, *URL])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def created(self, *arguments: str) -> Any:
        code, out, err = self.ask("keys", "create", "--json", *arguments)
        assert code == 0, err
        return json.loads(out)

    def entries(self) -> dict[str, ApiKey | Tenant]:
        async def read() -> Any:
            async with self.joined("") as bus:
                return await identities.entries(bus)

        found = asyncio.run(read())
        return {e.key_id if isinstance(e, ApiKey) else e.tenant: e for e in found}


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Stack:
    return Stack(monkeypatch, capsys)


def test_a_key_is_printed_once_and_kept_as_a_hash(stack: Stack) -> None:
    code, out, _ = stack.ask("keys", "create", "--tenant", "acme", "--name", "laptop")
    assert code == 0
    secret = next(line.split()[1] for line in out.splitlines() if line.startswith("key "))
    assert secret.startswith("dk-")
    assert len(secret) == 46
    assert "every request to every gateway needs a key" in out
    (entry,) = stack.entries().values()
    assert isinstance(entry, ApiKey)
    assert (entry.tenant, entry.name, entry.sha256) == ("acme", "laptop", digest(secret))
    assert "@" in entry.created_by
    everything = stack.ask("keys", "list")[1] + stack.ask("keys", "show", entry.key_id)[1]
    assert secret not in everything
    assert entry.sha256 not in everything
    assert entry.shown in everything


def test_keys_differ_and_say_what_was_asked(stack: Stack) -> None:
    made = stack.created(
        "--expires", "90d", "--role", "viewer", "--requests-per-minute", "600", "--concurrency", "4"
    )
    other = stack.created()
    assert made["key"] != other["key"]
    assert (made["role"], made["state"]) == ("viewer", "active")
    assert made["limits"] == {"requests_per_minute": 600, "concurrency": 4}
    entry = stack.entries()[made["id"]]
    assert isinstance(entry, ApiKey)
    assert entry.expires_unix_ms - entry.created_unix_ms == 90 * 86_400_000
    assert other["expires"] == ""


def test_revoking_keeps_the_record_and_forgetting_does_not(stack: Stack) -> None:
    first, second = stack.created(), stack.created()
    assert stack.ask("keys", "revoke", first["id"])[0] == 0
    assert stack.ask("keys", "revoke", first["id"])[0] == 0  # again is no error
    listed = {k["id"]: k for k in json.loads(stack.ask("keys", "list", "--json")[1])}
    assert [listed[k["id"]]["state"] for k in (first, second)] == ["revoked", "active"]
    _, out, _ = stack.ask("keys", "revoke", "--forget", first["id"], second["key"])
    assert "serve this machine alone" in out
    assert stack.entries() == {}
    assert "no API keys" in stack.ask("keys", "list")[1]


def test_a_table_for_people(stack: Stack) -> None:
    made = stack.created("--name", "[bold]laptop", "--tokens-per-minute", "1000")
    _, out, _ = stack.ask("keys", "list")
    for told in (made["id"], "[bold]laptop", "1000 tokens/min", "never", "active"):
        assert told in out
    assert "no API keys of tenant 'rival'" in stack.ask("keys", "list", "--tenant", "rival")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("keys", "create", "--tenant", "Acme Inc"), "a tenant's name has 1 to 64 lowercase"),
        (("keys", "create", "--expires", "soon"), "expected a time such as 12h, 90d or 52w"),
        (("keys", "create", "--expires", "0d"), "expected a time"),
        (("keys", "create", "--name", "a\nb"), "printable"),
        (("keys", "show", "nothing"), "there is no key 'nothing'"),
        (("keys", "revoke", "dk-secret"), "there is no key that key"),
        (("tenants", "limit", "a.b"), "a tenant's name"),
        (("usage", "--since", "yesterday"), "expected a day as 2026-01-31"),
    ],
)
def test_what_cannot_be_done_says_so(stack: Stack, arguments: tuple[str, ...], says: str) -> None:
    code, _, err = stack.ask(*arguments)
    assert code in (1, 2)
    assert says in err
    assert "dk-secret" not in err


def test_an_id_may_be_shortened_as_far_as_it_is_clear(stack: Stack) -> None:
    made = stack.created()
    assert json.loads(stack.ask("keys", "show", made["id"][:6])[1])["id"] == made["id"]
    for key_id in ("ab01", "ab02"):
        self_made = ApiKey(key_id=key_id, sha256=key_id, shown="dk-x", created_unix_ms=1)

        async def put(key: ApiKey = self_made) -> None:
            async with stack.joined("") as bus:
                await identities.keys_bucket(bus).create(key_entry(key.key_id), key)

        asyncio.run(put())
    code, _, err = stack.ask("keys", "revoke", "ab0")
    assert code == 1
    assert "more than one key: ab01, ab02" in err


def test_limits_of_a_tenant(stack: Stack) -> None:
    stack.created("--tenant", "acme")
    _, out, _ = stack.ask("tenants", "limit", "acme", "--requests-per-minute", "60")
    assert "60 requests/min" in out
    entry = stack.entries()["acme"]
    assert isinstance(entry, Tenant)
    assert entry.limits == RateLimits(requests_per_minute=60)
    (told,) = json.loads(stack.ask("tenants", "list", "--json")[1])
    assert told == {
        "tenant": "acme",
        "keys": 1,
        "limits": {"requests_per_minute": 60},
        "state": "active",
    }
    assert "none" in stack.ask("tenants", "limit", "acme")[1]
    changed = stack.entries()["acme"]
    assert isinstance(changed, Tenant)
    assert changed.limits == RateLimits()
    assert changed.created_unix_ms == entry.created_unix_ms
    assert "acme" in stack.ask("tenants", "list")[1]


def test_use_is_listed_and_summed(stack: Stack) -> None:
    async def write() -> None:
        async with stack.joined("") as bus:
            bucket = bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry)))
            for day, tenant in (
                ("2026-01-01", "acme"),
                ("2026-01-02", "acme"),
                ("2026-01-02", "b"),
            ):
                used = Used(requests=2, prompt_tokens=30, kv_token_s=1.25)
                made = UsageDay(tenant=tenant, day=day, used=used, upto_seq=1)
                await bucket.put(usage_key(day, tenant), made)

    assert "nothing was used" in stack.ask("usage")[1]
    asyncio.run(write())
    told = json.loads(stack.ask("usage", "--json")[1])
    assert [(d["day"], d["tenant"], d["requests"]) for d in told] == [
        ("2026-01-01", "acme", 2),
        ("2026-01-02", "acme", 2),
        ("2026-01-02", "b", 2),
    ]
    table = stack.ask("usage", "--tenant", "acme")[1]
    assert next(line.split()[:3] for line in table.splitlines() if "total" in line) == [
        "total",
        "4",
        "60",
    ]
    since = json.loads(stack.ask("usage", "--since", "2026-01-02", "--json")[1])
    assert len(since) == 2

"""`diptych audit` and `diptych tenants purge` on a memory bus; `--nats-url`."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_cli import auditing, commands, credentials, identities, tenants
from diptych_cli.purging import Patience
from diptych_cli.usage import energy
from diptych_contracts.errors import BusAway
from diptych_contracts.usage import Used

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

    def ask(self, *arguments: str, url: tuple[str, str] = URL) -> tuple[int, str, str]:
        """A command's exit code, output and errors."""
        code = commands.main([*arguments, *url])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def audit(self, *arguments: str) -> list[Any]:
        code, out, err = self.ask("audit", "--json", *arguments)
        assert code == 0, err
        found: list[Any] = json.loads(out)
        return found


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Stack:
    return Stack(monkeypatch, capsys)


def test_every_change_is_written_down_with_its_actor_and_without_the_secret(stack: Stack) -> None:
    made = json.loads(stack.ask("keys", "create", "--tenant", "acme", "--json")[1])
    stack.ask("tenants", "limit", "acme", "--concurrency", "4")
    stack.ask("keys", "revoke", made["id"])
    stack.ask("keys", "revoke", "--forget", made["id"])
    found = stack.audit()
    assert [(e["action"], e["object"], e["outcome"]) for e in found] == [
        ("keys.create", f"key:{made['id']}", "done"),
        ("tenants.limit", "tenant:acme", "done"),
        ("keys.revoke", f"key:{made['id']}", "done"),
        ("keys.forget", f"key:{made['id']}", "done"),
    ]
    assert {(e["actor"], e["door"]) for e in found} == {(auditing.who(), "cli")}
    assert "tenant acme, role user" in found[0]["detail"]
    everything = b"".join(m.data for m in stack.broker.streams["AUDIT"].after(0))
    assert made["key"].encode() not in everything
    assert made["key"][8:].encode() not in everything


def test_what_is_looked_at_is_not_a_change(stack: Stack) -> None:
    for command in (("keys", "list"), ("tenants", "list"), ("usage",)):
        assert stack.ask(*command)[0] == 0
    assert stack.audit() == []
    assert "no such action" in stack.ask("audit")[1]


def test_the_audit_is_asked_by_actor_action_object_and_time(stack: Stack) -> None:
    stack.ask("keys", "create", "--tenant", "acme")
    stack.ask("tenants", "limit", "rival")
    assert [e["action"] for e in stack.audit("--action", "keys")] == ["keys.create"]
    assert [e["action"] for e in stack.audit("--object", "rival")] == ["tenants.limit"]
    assert len(stack.audit("--actor", "@", "--since", "1h")) == 2
    assert stack.audit("--actor", "key:") == []
    table = stack.ask("audit")[1]
    assert "tenants.limit" in table
    code, _, err = stack.ask("audit", "--since", "soon")
    assert (code, "expected a time such as" in err) == (2, True)


def test_what_fails_is_written_down_as_failed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.ask("keys", "create")
    (made,) = json.loads(stack.ask("keys", "list", "--json")[1])

    async def broken(*_: object) -> None:
        raise BusAway("nobody answers")

    monkeypatch.setattr("diptych_cli.keys._revoke", broken)
    assert stack.ask("keys", "revoke", made["id"])[0] == 1
    last = stack.audit()[-1]
    assert (last["outcome"], last["detail"]) == ("failed", "tenant default; nobody answers")


def test_what_cannot_be_written_down_is_not_done(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise BusAway("full")

    monkeypatch.setattr(MemoryBus, "store", away)
    code, _, err = stack.ask("keys", "create")
    assert code == 1
    assert "nothing was done" in err
    monkeypatch.undo()


def test_a_purge_is_counted_first_and_done_when_one_is_sure(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "PATIENCE", Patience(known_s=0.0))
    stack.ask("keys", "create", "--tenant", "acme")
    stack.ask("keys", "create", "--tenant", "rival")
    code, out, _ = stack.ask("tenants", "purge", "acmee")
    assert (code, out) == (1, "There is nothing of tenant 'acmee': see diptych tenants list.\n")
    code, out, _ = stack.ask("tenants", "purge", "acme")
    assert code == 1
    assert "Nothing was deleted" in out
    assert len(json.loads(stack.ask("keys", "list", "--json")[1])) == 2
    told = json.loads(stack.ask("tenants", "purge", "acme", "--json")[1])
    assert told == {"tenant": "acme", "would_delete": {"keys": 1}}
    monkeypatch.setattr(credentials, "access", lambda _url: SimpleNamespace(name="me", role=""))
    code, out, _ = stack.ask("tenants", "purge", "acme", "--yes")
    assert code == 0, out
    assert "tenant 'acme' is purged" in out
    assert "remains:" in out
    assert "400 d" in out
    (left,) = json.loads(stack.ask("keys", "list", "--json")[1])
    assert left["tenant"] == "rival"
    states = {
        t["tenant"]: t["state"] for t in json.loads(stack.ask("tenants", "list", "--json")[1])
    }
    assert states == {"acme": "purged", "rival": "active"}
    code, _, err = stack.ask("keys", "create", "--tenant", "acme")
    assert (code, "was purged" in err) == (1, True)
    last = stack.audit("--action", "tenants.purge")[-1]
    assert (last["object"], last["outcome"]) == ("tenant:acme", "done")
    assert last["detail"].startswith("1 things deleted")


def test_the_old_spelling_of_the_bus_still_works_with_a_word(stack: Stack) -> None:
    for name in ("--nats-url", "--nats"):
        code, _, err = stack.ask("keys", "list", url=(name, "nats://nowhere"))
        assert (code, err) == (0, "")
    code, _, err = stack.ask("keys", "list", url=("--url", "nats://nowhere"))
    assert code == 0
    assert "--url is called --nats-url here" in err


@pytest.mark.parametrize(
    ("used", "says"),
    [
        (Used(), ""),
        (Used(decode_j=2.0), "measured"),
        (Used(prefill_j=1.0, decode_j=2.0, sim_j=3.0), "simulated"),
        (Used(prefill_j=1.0, decode_j=2.0, sim_j=1.0), "1.0 J simulated"),
    ],
)
def test_joules_that_nobody_measured_are_marked(used: Used, says: str) -> None:
    assert energy(used) == says

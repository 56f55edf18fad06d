"""`diptych dead` on a memory bus."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.permissions.granting import table
from diptych_cli import commands, dead
from diptych_cli.failing import CliError
from diptych_cli.graveyard import Grave, graves, pick
from diptych_cli.retrying import RETRIED_FROM, retry_of
from diptych_contracts import subjects
from diptych_contracts.dead import Cause, DeadEntry, DeadLetter, DeadRequest, DeadRetried
from diptych_contracts.events import MemberJoined
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.prompts import PromptRef, compact, digest_of, packed
from diptych_contracts.requests import Request, Setback
from diptych_contracts.responses import StoredMessage, StoredResponse, response_id
from diptych_contracts.streams import (
    DEAD,
    DEAD_PROMPTS,
    GATEWAY_HEADER,
    MODELS,
    PROMPTS,
    REQUESTS,
    RESPONSES,
)
from diptych_contracts.wire import Message, encode
from diptych_identity.authority import Authority
from diptych_testkit.builders import GATEWAY, MODEL, a_request
from diptych_testkit.tiny_gguf import tiny_card

ID = RequestId("5f0c" * 8)
OTHER = RequestId("5f1d" * 8)
D1 = Incarnation("decode-worker-1")
PLACE = dead.Place("nats://nowhere", "http://127.0.0.1:8080/v1")


def a_dead(request_id: RequestId = ID, **changes: Any) -> DeadRequest:
    values: dict[str, Any] = {
        "request_id": request_id,
        "gateway": GATEWAY,
        "scheduler": Incarnation("s1"),
        "cause": Cause.LOST_WORKERS,
        "detail": "5 attempts were lost",
        "request": a_request(request_id, prompt_ids=(72, 73)),
        "attempts": 5,
        "lost_attempts": 5,
        "setbacks": (Setback(attempt=1, why="d is gone", workers=(D1,), lost=True, unix_ms=1000),),
        "died_unix_ms": 1_796_000_000_000,
        "trace_id": "ab" * 16,
    }
    return DeadRequest(**(values | changes))


class Stack:
    """A broker that a command finds instead of a stack's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = MemoryBroker()
        monkeypatch.setattr(dead, "joined", self.joined)

    @asynccontextmanager
    async def joined(self, _url: str) -> AsyncIterator[MemoryBus]:
        bus = self.broker.connect("cli")
        yield bus
        await bus.close()

    def on_bus(self, work: Callable[[MemoryBus], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with self.joined("") as bus:
                return await work(bus)

        return asyncio.run(run())

    def bury(self, *entries: DeadRequest) -> None:
        for entry in entries:
            subject = subjects.dead_request(entry.request_id)
            self.store(subject, entry, subject)

    def store(self, subject: str, message: Message, msg_id: str) -> None:
        self.on_bus(lambda bus: bus.store(subject, message, msg_id=msg_id, timeout_s=60))

    def requests(self) -> list[Request]:
        async def work(bus: MemoryBus) -> list[Request]:
            found = bus.all_stored(REQUESTS.name, subject="request.>")
            items = [item.delivery async for item in found]
            requests = [item.decode(Request) for item in items]
            assert [d.headers[GATEWAY_HEADER] for d in items] == [r.gateway for r in requests]
            return requests

        found: list[Request] = self.on_bus(work)
        return found

    def response(self, wanted: str) -> StoredResponse | None:
        async def work(bus: MemoryBus) -> StoredResponse | None:
            kept = await bus.bucket(RESPONSES, StoredResponse).get(wanted)
            return None if kept is None else kept.value

        found: StoredResponse | None = self.on_bus(work)
        return found


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Stack:
    return Stack(monkeypatch)


def test_nothing_dead_is_said(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert dead.show_all(PLACE, as_json=False) == 0
    assert capsys.readouterr().out == "no dead requests\n"
    dead.show_all(PLACE, as_json=True)
    assert json.loads(capsys.readouterr().out) == []
    dead.retry(PLACE, (), every=True, again=False)
    assert capsys.readouterr().out == "nothing to retry\n"


def test_the_list_says_what_died_when_and_why(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.bury(a_dead(), a_dead(OTHER, tokens=7, attempts=6))
    dead.show_all(PLACE, as_json=False)
    header, _, first, second = [li for li in capsys.readouterr().out.splitlines() if li.strip()]
    assert header.split()[:4] == ["id", "died", "cause", "model"]
    assert first.split()[:7] == [
        *(ID, "2026-11-30T00:53:20+00:00", "lost_workers", MODEL, "2", "0", "5"),
    ]
    assert second.split()[5:7] == ["7", "6"]
    dead.show_all(PLACE, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [t["id"] for t in told] == [ID, OTHER]
    assert told[0]["reason"] == "5 attempts were lost"


def test_show_tells_everything_but_what_people_wrote(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.bury(a_dead())
    dead.show_one(PLACE, ID[:6], prompt=False)
    told = json.loads(capsys.readouterr().out)
    assert told["trace_id"] == "ab" * 16
    assert told["setbacks"][0]["workers"] == [D1]
    assert told["setbacks"][0]["at"] == "1970-01-01T00:00:01+00:00"
    assert told["request"]["prompt_ids"] == []
    assert "prompt" not in told
    dead.show_one(PLACE, f"chatcmpl-{ID}", prompt=True)
    assert json.loads(capsys.readouterr().out)["prompt"] == "72 73"
    card = tiny_card(model=MODEL)
    stack.on_bus(lambda bus: bus.put_object(MODELS, MODEL, encode(card)))
    dead.show_one(PLACE, ID, prompt=True)
    assert json.loads(capsys.readouterr().out)["prompt"] not in ("", "72 73")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("9", "no dead request is called '9'; diptych dead list shows"),
        ("", "no dead request is called ''"),
        ("5f", f"2 dead requests begin with '5f': {ID}, {OTHER}"),
    ],
)
def test_an_id_that_names_none_or_several_is_told(stack: Stack, wanted: str, says: str) -> None:
    stack.bury(a_dead(), a_dead(OTHER))
    with pytest.raises(CliError, match=says):
        dead.show_one(PLACE, wanted, prompt=False)


def test_a_retry_is_a_new_background_response(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.bury(a_dead())
    dead.retry(PLACE, (ID,), every=False, again=False)
    (request,) = stack.requests()
    answer = response_id(request.request_id)
    assert capsys.readouterr().out == f"{ID} → http://127.0.0.1:8080/v1/responses/{answer}\n"
    assert request.request_id != ID
    assert request.prompt_ids == (72, 73)
    assert request.background
    stored = stack.response(answer)
    assert stored is not None
    assert (stored.background, stored.store, stored.answer) == (True, True, None)
    assert (stored.gateway, stored.request_id) == (request.gateway, request.request_id)
    assert stored.metadata == ((RETRIED_FROM, ID),)
    with pytest.raises(CliError, match=f"was retried already, as {answer}; once more with --again"):
        dead.retry(PLACE, (ID,), every=False, again=False)
    dead.retry(PLACE, (), every=True, again=False)
    assert capsys.readouterr().out == "nothing to retry\n"
    dead.retry(PLACE, (ID,), every=False, again=True)
    assert len({r.request_id for r in stack.requests()}) == 2
    dead.show_all(PLACE, as_json=True)
    shown = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(shown)[0]["retried_as"] not in ("", answer)


def test_a_retried_response_keeps_what_it_was(stack: Stack) -> None:
    original = StoredResponse(
        request_id=ID,
        gateway=GATEWAY,
        journal_seq=17,
        model=MODEL,
        created_unix_ms=1,
        deadline_unix_ms=2,
        prompt_tokens=2,
        sampling=a_request().sampling,
        input=(StoredMessage(role="user", text="hi"),),
        metadata=(("a", "b"),),
    )
    bucket = lambda bus: bus.bucket(RESPONSES, StoredResponse)  # noqa: E731
    stack.on_bus(lambda bus: bucket(bus).create(original.response_id, original))
    stack.bury(a_dead())
    dead.retry(PLACE, (ID,), every=False, again=False)
    (request,) = stack.requests()
    stored = stack.response(response_id(request.request_id))
    assert stored is not None
    assert stored.input == original.input
    assert stored.metadata == (("a", "b"), (RETRIED_FROM, ID))
    assert stored.journal_seq == 0


def test_a_long_prompt_is_kept_and_retried_too(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    width, data = packed(compact(300, (72, 73, 74)))
    ref = PromptRef(name=ID, tokens=3, width=width, digest=digest_of(data))
    stack.bury(a_dead(request=a_request(ID, prompt_ids=(), prompt=ref)))
    with pytest.raises(CliError, match=f"the prompt of {ID} is gone: its 3 tokens"):
        dead.retry(PLACE, (ID,), every=False, again=False)
    assert stack.requests() == []
    stack.on_bus(lambda bus: bus.put_object(DEAD_PROMPTS, ID, data))
    dead.show_one(PLACE, ID, prompt=True)
    assert json.loads(capsys.readouterr().out)["prompt"] == "72 73 74"
    dead.retry(PLACE, (ID,), every=False, again=False)
    (request,) = stack.requests()
    assert request.prompt is not None
    assert request.prompt.name == request.request_id, "it goes with the new request"
    assert stack.on_bus(lambda bus: bus.get_object(PROMPTS, request.request_id)) == data


def test_two_who_retry_at_once_make_one_request() -> None:
    grave = Grave(ID, 1, a_dead())
    one = retry_of(grave, again=False, now_unix_ms=1)
    two = retry_of(grave, again=False, now_unix_ms=2)
    assert one.request.request_id == two.request.request_id
    grave.retries.append(
        DeadRetried(request_id=ID, retried_as=one.request.request_id, retried_unix_ms=1)
    )
    three = retry_of(grave, again=True, now_unix_ms=3)
    assert three.request.request_id != one.request.request_id


def test_the_slower_of_two_is_told_and_the_rest_is_retried(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.bury(a_dead(), a_dead(OTHER))
    dead.retry(PLACE, (ID,), every=False, again=False)

    async def forget(bus: MemoryBus) -> None:
        async for item in bus.all_stored(DEAD.name, subject=subjects.DEADS):
            if isinstance(item.delivery.decode(DeadEntry), DeadRetried):
                await bus.erase(DEAD.name, item.seq)

    stack.on_bus(forget)
    with pytest.raises(CliError, match=f"{ID} is being retried already, as resp_"):
        dead.retry(PLACE, (), every=True, again=False)
    assert len(stack.requests()) == 2
    assert f"{OTHER} → " in capsys.readouterr().out


def test_what_was_no_request_then_may_be_one_now(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = subjects.dead(REQUESTS.name)
    kept = DeadLetter(
        subject="request.x.y",
        reason="expected a Request",
        payload=encode(a_request(ID)),
        request_id=ID,
        gateway=GATEWAY,
    )
    stack.store(subject, kept, "REQUESTS.1")
    nonsense = msgspec.structs.replace(kept, request_id="", payload=b"\xc1")
    stack.store(subject, nonsense, "REQUESTS.2")
    stack.store("dead.request.x", MemberJoined(member=D1), "x")
    dead.show_all(PLACE, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [(t["id"], t["cause"]) for t in told] == [
        (ID, "unreadable"),
        ("seq-2", "unreadable"),
        ("seq-3", "unreadable"),
    ]
    dead.retry(PLACE, (), every=True, again=False)
    (request,) = stack.requests()
    assert request.prompt_ids == a_request().prompt_ids
    with pytest.raises(CliError, match="seq-2 cannot be retried: the request itself was not kept"):
        dead.retry(PLACE, ("seq-2",), every=False, again=False)
    dead.show_one(PLACE, "seq-2", prompt=True)
    shown = capsys.readouterr().out
    assert json.loads(shown[shown.index("{") :])["prompt"] == "wQ=="


def test_a_bus_that_goes_away_is_told(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_bus: MemoryBus) -> list[Grave]:
        from diptych_contracts.errors import BusAway

        raise BusAway("no answer reading dead.> of DEAD")

    monkeypatch.setattr(dead, "graves", away)
    with pytest.raises(CliError, match="the stack's bus does not answer any more: no answer"):
        dead.show_all(PLACE, as_json=False)


def test_nobody_at_the_url_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIPTYCH_IDENTITY", raising=False)
    me = str(Authority.make(tmp_path / "certs", table()).issue_operator())
    where = ["dead", "list", "--nats-url", "tls://127.0.0.1:1"]
    assert commands.main([*where, "--identity", me]) == 1
    assert "the stack's bus does not answer" in capsys.readouterr().err
    assert commands.main(where) == 1
    assert "asks who you are" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("retry",), ("retry", "--all", "5f")])
def test_retry_wants_names_or_all(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["dead", *arguments, "--nats-url", "nats://127.0.0.1:1"]) == 2
    assert "name the requests to retry, or --all of them" in capsys.readouterr().err


async def test_the_newest_retry_counts() -> None:
    bus = MemoryBroker().connect("test")
    subject = subjects.dead_request(ID)
    await bus.store(subject, a_dead(), msg_id="1", timeout_s=60)
    for number in (2, 3):
        told = DeadRetried(
            request_id=ID, retried_as=RequestId(f"r{number}"), retried_unix_ms=number
        )
        await bus.store(subject, told, msg_id=f"{number}", timeout_s=60)
    grave = pick(await graves(bus), f"resp_{ID}")
    assert [r.retried_as for r in grave.retries] == ["r2", "r3"]
    assert dead.facts(grave)["retried_as"] == "resp_r3"
    await bus.close()


def test_a_retry_has_a_secret_of_its_own_and_none_is_shown(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever worked on the dead one knows voices made of the old one."""
    old = a_request(ID, prompt_ids=(72, 73), secret=b"an older process")
    stack.bury(a_dead(request=old))
    dead.show_one(PLACE, ID, prompt=False)
    assert "secret" not in capsys.readouterr().out
    dead.retry(PLACE, [ID], every=False, again=False)
    (request,) = stack.requests()
    assert len(request.secret) == 16
    assert request.secret != old.secret
    stored = stack.response(response_id(request.request_id))
    assert stored is not None
    assert stored.secret == request.secret

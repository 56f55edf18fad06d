"""A gateway that runs an idempotent request stops between two steps; its client asks another.

One test per crash point; `docs/testing.md` names them. Whatever happened, the answer is the
undisturbed one, and no request ran twice.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from diptych_contracts import subjects
from diptych_contracts.fleet import Role
from diptych_contracts.idempotency import Claim, ClaimState
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Request, RequestRecord
from diptych_contracts.streams import IDEMPOTENCY, REQUEST_RECORDS, REQUESTS
from diptych_contracts.wire import decode
from diptych_gateway.idempotency import joining
from diptych_testkit.aftermath import messages, nothing_is_left, views
from diptych_testkit.builders import MODEL, a_request
from diptych_testkit.cut_fleet import CutFleet, cut_fleet, slow_engine
from diptych_testkit.interruptions import Call, Cut
from diptych_testkit.small_gateway import VOCAB_SIZE, SmallGateway, small_gateway

CHAT = "/v1/chat/completions"
TOKENS = 120
KEY = {"Idempotency-Key": "k1"}


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "Hello"}]
    return {"model": MODEL, "messages": said, "max_tokens": tokens, "temperature": 0, **more}


def stores_request(call: Call) -> bool:
    return call.is_a(Request, kind="store")


@asynccontextmanager
async def served() -> AsyncIterator[CutFleet]:
    """Workers and a scheduler that serve a model a gateway can spell."""
    async with cut_fleet() as case:
        case.fleet.scheduler("s1")
        case.fleet.worker("p1", Role.PREFILL, engine=slow_engine(vocab_size=VOCAB_SIZE))
        case.fleet.worker("d1", Role.DECODE, engine=slow_engine(vocab_size=VOCAB_SIZE))
        await case.fleet.ready()
        yield case


async def the_request(case: CutFleet) -> Request:
    """The one that is stored, once it is."""
    async with asyncio.timeout(60):
        while not (found := list(messages(case.fleet, REQUESTS.name))):
            await asyncio.sleep(0.01)
    return cast(Request, decode(found[0].data, Request))


async def dropped(asking: "asyncio.Task[Any]") -> None:
    """The client of a dead gateway notices it."""
    asking.cancel()
    await asyncio.wait([asking])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway is given up soon after its accept deadline."""
    monkeypatch.setattr(joining, "_GIVE_UP_S", 0.3)


def claims(state: ClaimState) -> Any:
    def place(call: Call) -> bool:
        return call.is_a(Claim) and call.message.state is state

    return place


async def ask(gateway: SmallGateway, **more: Any) -> str:
    answer = await gateway.post(CHAT, chat(TOKENS, **more), **KEY)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def undisturbed(gateway: SmallGateway) -> str:
    answer = await gateway.post(CHAT, chat(TOKENS))
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def ran(case: CutFleet) -> list[RequestRecord]:
    """The records of requests that had tokens."""
    bucket = case.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    found = [await bucket.get(key) for key in list(case.broker.bucket(REQUEST_RECORDS).values)]
    records = [kept.value for kept in found if kept is not None]
    return [record for record in records if record.assignment is not None]


async def survives(case: CutFleet, g1: SmallGateway, g2: SmallGateway, cut: Cut) -> None:
    """g1 dies at `cut`; who asks g2 the same has the answer, once computed."""
    expected = await undisturbed(g2)
    before = len(await ran(case))
    asking = asyncio.create_task(ask(g1))
    await cut.reached.wait()
    await g1.kill()
    await dropped(asking)
    assert await ask(g2) == expected
    assert len(await ran(case)) == before + 1
    assert await ask(g2) == expected
    assert len(await ran(case)) == before + 1
    await case.fleet.settled()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_the_key_is_claimed(after: bool) -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1", accept_s=(0.5,)) as g1,
        small_gateway(case.fleet, "g2") as g2,
    ):
        stop = case.broker.kill_after if after else case.broker.kill_before
        await survives(case, g1, g2, stop("g1", claims(ClaimState.CLAIMED)))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_the_request_is_stored(after: bool) -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1", accept_s=(0.5,)) as g1,
        small_gateway(case.fleet, "g2") as g2,
    ):
        stop = case.broker.kill_after if after else case.broker.kill_before
        await survives(case, g1, g2, stop("g1", stores_request))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_the_claim_is_marked_as_stored(after: bool) -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1") as g1,
        small_gateway(case.fleet, "g2") as g2,
    ):
        stop = case.broker.kill_after if after else case.broker.kill_before
        await survives(case, g1, g2, stop("g1", claims(ClaimState.STORED)))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_the_answer_is_kept(after: bool) -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1") as g1,
        small_gateway(case.fleet, "g2") as g2,
    ):
        stop = case.broker.kill_after if after else case.broker.kill_before
        await survives(case, g1, g2, stop("g1", claims(ClaimState.ENDED)))


async def test_in_mid_stream_another_gateway_says_all_of_it() -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1") as g1,
        small_gateway(case.fleet, "g2") as g2,
    ):
        expected = await undisturbed(g2)
        heard = 0

        async def listen() -> None:
            nonlocal heard
            async with g1.client.stream(
                "POST", CHAT, json=chat(TOKENS, stream=True), headers=KEY
            ) as s:
                async for _ in s.aiter_lines():
                    heard += 1

        listening = asyncio.create_task(listen())
        while heard < 30:
            await asyncio.sleep(0.01)
        await g1.kill()
        await dropped(listening)
        text = ""
        async with g2.client.stream("POST", CHAT, json=chat(TOKENS, stream=True), headers=KEY) as s:
            assert s.status_code == 200
            async for line in s.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    text += choices[0]["delta"].get("content") or ""
        assert text == expected
        assert len(await ran(case)) == 2
        await case.fleet.settled()


async def test_many_who_ask_at_once_run_one_request() -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1") as g1,
        small_gateway(case.fleet, "g2") as g2,
    ):
        texts = await asyncio.gather(*(ask(g) for g in (g1, g2) * 5))
        assert len(set(texts)) == 1
        assert len(await ran(case)) == 1
        await case.fleet.settled()


async def test_what_is_stored_after_it_was_withdrawn_does_not_run() -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1", accept_s=(0.5,)) as g1,
        small_gateway(case.fleet, "g2") as g2,
    ):
        expected = await undisturbed(g2)
        cut = case.broker.kill_before("g1", stores_request)
        asking = asyncio.create_task(ask(g1))
        await cut.reached.wait()
        assert cut.call is not None
        withdrawn = cut.call.message.request_id
        await g1.kill()
        await dropped(asking)
        assert await ask(g2) == expected
        before = len(await ran(case))
        late = a_request(withdrawn, gateway=g1.incarnation, created_unix_ms=10**13)
        await case.fleet.bus.store(
            subjects.request("interactive", MODEL), late, msg_id=withdrawn, timeout_s=60
        )
        record = (await nothing_is_left(case.fleet, (withdrawn,)))[withdrawn]
        ids = views(case.fleet)[withdrawn].token_ids
        assert record.end is not None
        assert (record.end.reason, ids) == (EndReason.CANCELLED, [])
        assert len(await ran(case)) == before


async def test_a_request_given_up_unread_runs_anew_for_who_comes_late() -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1", resume_grace_s=0.2) as g1,
        small_gateway(case.fleet, "g2") as g2,
    ):
        asking = asyncio.create_task(g1.post(CHAT, chat(700), **KEY))
        first = await the_request(case)
        await dropped(asking)
        record = (await nothing_is_left(case.fleet, (first.request_id,)))[first.request_id]
        assert record.end is not None
        assert record.end.reason is EndReason.CANCELLED
        answer = await g2.post(CHAT, chat(700), **KEY)
        assert answer.status_code == 200, answer.text
        assert first.request_id not in answer.json()["id"]
        kept = case.broker.bucket(IDEMPOTENCY).values
        assert len(kept) == 1

"""A real gateway stops between two of its steps. One test per crash point.

`docs/testing.md` names the row of each.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from diptych_bus.memory import Faults
from diptych_contracts import subjects
from diptych_contracts.fleet import Role
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS, REQUESTS
from diptych_contracts.wire import decode
from diptych_testkit.aftermath import messages, nothing_is_left, views
from diptych_testkit.builders import MODEL
from diptych_testkit.cut_fleet import CutFleet, cut_fleet, slow_engine
from diptych_testkit.interruptions import Call
from diptych_testkit.small_gateway import VOCAB_SIZE, SmallGateway, small_gateway

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


def chat(tokens: int = 16, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "Hello"}]
    return {"model": MODEL, "messages": said, "max_tokens": tokens, "temperature": 0, **more}


def response(tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "input": "Hello",
        "max_output_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }


def stores_request(call: Call) -> bool:
    return call.is_a(Request, kind="store")


@asynccontextmanager
async def served(faults: Faults | None = None) -> AsyncIterator[CutFleet]:
    """Workers and a scheduler that serve a model a gateway can spell."""
    async with cut_fleet(faults) as case:
        case.fleet.scheduler("s1")
        case.fleet.worker("p1", Role.PREFILL, engine=slow_engine(vocab_size=VOCAB_SIZE))
        case.fleet.worker("d1", Role.DECODE, engine=slow_engine(vocab_size=VOCAB_SIZE))
        await case.fleet.ready()
        yield case


def requests(case: CutFleet) -> list[Request]:
    return [decode(m.data, Request) for m in messages(case.fleet, REQUESTS.name)]


async def the_request(case: CutFleet) -> Request:
    """The one that is stored, once it is."""
    async with asyncio.timeout(60):
        while not (found := requests(case)):
            await asyncio.sleep(0.01)
    (request,) = found
    return request


async def record_of(case: CutFleet, request_id: str) -> RequestRecord | None:
    kept = await case.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).get(request_id)
    return None if kept is None else kept.value


async def over(case: CutFleet, request_id: str) -> tuple[RequestRecord, list[int]]:
    """The closed record of a request that left nothing, and its tokens as the journal tells."""
    record = (await nothing_is_left(case.fleet, (request_id,), timeout_s=60))[request_id]
    return record, views(case.fleet)[request_id].token_ids


async def dropped(asking: "asyncio.Task[Any]") -> None:
    """The client of a dead gateway notices it."""
    asking.cancel()
    await asyncio.wait([asking])


async def test_request_stored_but_its_acknowledgement_lost_is_stored_once() -> None:
    faults = Faults(Random(2), lost_ack_frac=0.6, affects=lambda s: s.startswith("request."))
    async with served(faults) as case, small_gateway(case.fleet, "g1", accept_s=(10.0,)) as g1:
        again = case.broker.note("g1", stores_request)
        answers = [await g1.post(CHAT, chat()) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
        assert case.broker.streams[REQUESTS.name].last_seq == 6
        assert again.reached.is_set()
        await case.fleet.settled()


async def test_a_gateway_that_fails_tells_its_clients() -> None:
    """Where the bus is gone for good it leaves at once; streams once just broke off."""
    async with served() as case, small_gateway(case.fleet, "g1") as g1:
        events = g1.events(CHAT, chat(2000, stream=True))
        assert "choices" in await anext(events)
        failing = asyncio.create_task(g1.fail())
        rest = [event async for event in events]
        await failing
        assert rest[-1]["error"]["code"] == "unavailable"


async def test_request_stored_but_its_gateway_gives_up() -> None:
    faults = Faults(Random(2), lost_ack_frac=1.0, affects=lambda s: s.startswith("request."))
    async with served(faults) as case, small_gateway(case.fleet, "g1", accept_s=(0.3,)) as g1:
        asking = asyncio.create_task(g1.post(CHAT, chat(2000)))
        request = await the_request(case)
        answer = await asking
        assert (answer.status_code, answer.headers["x-request-id"]) == (503, request.request_id)
        record, _ = await over(case, request.request_id)
        assert record.end is not None
        assert record.end.reason is EndReason.CANCELLED


async def test_request_given_up_while_the_bus_is_away_and_stored_after_all() -> None:
    async with served() as case, small_gateway(case.fleet, "g1", accept_s=(0.3,)) as g1:
        await g1.post(CHAT, chat(1))
        case.broker.go_away()
        answer = await g1.post(CHAT, chat(2000))
        assert answer.status_code == 503
        request_id = answer.headers["x-request-id"]
        case.broker.come_back()
        async with asyncio.timeout(60):
            while (record := await record_of(case, request_id)) is None:
                await asyncio.sleep(0.01)
        assert (record.state, record.owner) == (RecordState.CANCELLING, g1.incarnation)
        late = await late_request(case, g1, request_id)
        await case.fleet.bus.store(
            subjects.request("interactive", MODEL), late, msg_id=request_id, timeout_s=60
        )
        closed, ids = await over(case, request_id)
        assert closed.end is not None
        assert (closed.end.reason, ids) == (EndReason.CANCELLED, [])


async def late_request(case: CutFleet, gateway: SmallGateway, request_id: str) -> Request:
    """What a publish that sat in a buffer would still store."""
    from diptych_testkit.builders import a_request

    return a_request(request_id, gateway=gateway.incarnation, created_unix_ms=10**13)


async def test_a_mark_whose_request_never_came_expires() -> None:
    async with served() as case, small_gateway(case.fleet, "g1", accept_s=(0.2,)) as g1:
        await g1.post(CHAT, chat(1))
        case.broker.go_away()
        request_id = (await g1.post(CHAT, chat())).headers["x-request-id"]
        case.broker.come_back()
        async with asyncio.timeout(60):
            while await record_of(case, request_id) is None:
                await asyncio.sleep(0.01)
        store = case.broker.bucket(REQUEST_RECORDS)
        assert store.values[request_id].expiry is not None


async def test_request_stored_and_its_gateway_dies_before_it_knows() -> None:
    async with served() as case, small_gateway(case.fleet, "g1") as g1:
        cut = case.broker.kill_after("g1", stores_request)
        asking = asyncio.create_task(g1.post(CHAT, chat(2000)))
        await cut.reached.wait()
        request = await the_request(case)
        await g1.kill()
        await dropped(asking)
        record, _ = await over(case, request.request_id)
        assert record.end is not None
        assert record.end.reason is EndReason.CANCELLED
        assert record.end.detail == f"{g1.incarnation} is gone"


async def test_request_stored_by_a_gateway_that_no_scheduler_ever_heard() -> None:
    """It died before the only scheduler came."""
    async with cut_fleet() as case:
        case.fleet.worker("d1", Role.DECODE, engine=slow_engine(vocab_size=VOCAB_SIZE))
        await case.fleet.ready()
        async with small_gateway(case.fleet, "g1") as g1:
            asking = asyncio.create_task(g1.post(CHAT, chat(16)))
            request = await the_request(case)
            await g1.kill()
            await dropped(asking)
        case.fleet.scheduler("s1")
        record, _ = await over(case, request.request_id)
        assert record.end is not None


@pytest.mark.parametrize("intent", [False, True])
async def test_accepted_but_the_client_never_answered(intent: bool) -> None:
    async with served() as case, small_gateway(case.fleet, "g1") as g1:
        headers = {"x-diptych-resume": "1"} if intent else {}
        tokens = 600 if intent else 1900  # more than any machine makes before it is cancelled
        asking = asyncio.create_task(g1.post(CHAT, chat(tokens), **headers))
        request = await the_request(case)
        await g1.kill()
        await dropped(asking)
        record, ids = await over(case, request.request_id)
        assert record.end is not None
        if intent:
            assert (record.end.reason, len(ids)) == (EndReason.LENGTH, 600)
        else:
            assert record.end.reason is EndReason.CANCELLED


async def test_token_delivered_and_another_gateway_goes_on_from_the_clients_cursor() -> None:
    tokens = 700
    async with served() as case, small_gateway(case.fleet, "g1") as g1:
        whole = [event async for event in g1.events(RESPONSES, response(tokens))]
        seen: list[Any] = []
        async for event in g1.events(RESPONSES, response(tokens)):
            seen.append(event)
            if len(seen) == 12:
                break
        path = f"{RESPONSES}/{seen[0]['response']['id']}"
        await g1.kill()
        async with small_gateway(case.fleet, "g2") as g2:
            after = seen[-1]["sequence_number"]
            query = f"{path}?stream=true&starting_after={after}"
            rest = [event async for event in g2.events(query)]
        assert numbers(seen + rest) == numbers(whole)
        assert text(seen + rest) == text(whole)
        request_id = path.rsplit("_", 1)[1]
        record, ids = await over(case, request_id)
        assert (record.gateway, len(ids)) == (g1.incarnation, tokens)


def numbers(events: list[Any]) -> list[int]:
    return [event["sequence_number"] for event in events]


def text(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if "delta" in event)


async def test_record_ending_but_no_end_published_and_its_gateway_dies() -> None:
    async with (
        served() as case,
        small_gateway(case.fleet, "g1", total_s=(0.5,), silence_grace_s=0) as g1,
    ):
        cut = case.broker.kill_before("g1", lambda call: call.kind == "record")
        reached = asyncio.create_task(cut.reached.wait())
        while not reached.done():  # where the scheduler was first to say that its time is over
            asking = asyncio.create_task(g1.post(CHAT, chat(2000)))
            await asyncio.wait({asking, reached}, return_when=asyncio.FIRST_COMPLETED)
        await reached
        request = requests(case)[-1]
        await g1.kill()
        await dropped(asking)
        record, _ = await over(case, request.request_id)
        assert record.end is not None
        assert record.end.reason is EndReason.EXPIRED

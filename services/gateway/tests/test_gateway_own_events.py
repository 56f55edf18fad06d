"""`diptych:queue`, `diptych:migration` and `diptych:energy` on a WebSocket, for those who ask."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

from diptych_contracts import subjects
from diptych_contracts.fleet import ClassQueue, QueueLoad
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import PriorityClass
from diptych_policy.queue_view import QueueView

SCHEDULER = Incarnation("scheduler-00000000cccc")
WANTED = {"diptych": {"events": True}}
TERMINAL = ("response.completed", "response.failed", "error")


@pytest.fixture(autouse=True)
def reports_stay_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a minute: a busy machine may take longer than their two seconds."""
    recent = QueueView._recent
    monkeypatch.setattr(
        QueueView, "_recent", lambda view, now_s, within_s: recent(view, now_s, max(within_s, 60))
    )


class Gate:
    """Answers wait; then a first worker says a token, and a second one the rest."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, fleet: Any, request: Any) -> None:
        await self.open.wait()
        ids = fleet.ids("Hello world")
        fleet.say(request, ids[:1])
        fleet.fence(request, 2)
        for _ in range(100):  # turns, in which its client is told
            await asyncio.sleep(0)
        fleet.say(request, ids[1:], index=1, attempt=2, end=EndReason.STOP)


@asynccontextmanager
async def opened(stack: Any) -> AsyncIterator[Any]:
    async with connect(stack.base_url.replace("http", "ws") + "/responses") as connection:
        yield connection


async def create(connection: Any, **changes: Any) -> None:
    body = {"type": "response.create", "model": "tiny", "input": "Hello", **changes}
    await connection.send(json.dumps(body))


async def next_event(connection: Any) -> Any:
    async with asyncio.timeout(60):
        return json.loads(await connection.recv())


async def turn(connection: Any) -> list[Any]:
    events = [await next_event(connection)]
    while events[-1]["type"] not in TERMINAL:
        events.append(await next_event(connection))
    return events


async def tell_queue(stack: Any, waiting: int, gap_s: float = 2.0) -> None:
    queue = ClassQueue(priority_class=PriorityClass.INTERACTIVE, waiting=waiting, gap_s=gap_s)
    load = QueueLoad(scheduler=SCHEDULER, queued=waiting, max_queued=1000, classes=(queue,))
    await stack.fleet.bus.publish(subjects.queue(SCHEDULER), load)


async def test_the_place_in_the_queue_is_told_and_told_again(run_stack: Any) -> None:
    gate = Gate()
    async with run_stack(gate) as stack, opened(stack) as connection:
        await tell_queue(stack, 4)
        await stack.until(lambda: stack.gateway.admission.queues._loads)
        await create(connection, **WANTED, stream_id="a")
        events = [await next_event(connection) for _ in range(3)]
        assert events[-1] == {
            "type": "diptych:queue",
            "sequence_number": 1,
            "response_id": events[0]["response"]["id"],
            "stream_id": "a",
            "position": 4,
            "eta_s": 10.0,
        }
        await tell_queue(stack, 2)
        again = await next_event(connection)
        assert (again["type"], again["position"], again["eta_s"]) == ("diptych:queue", 1, 4.0)
        gate.open.set()
        rest = await turn(connection)
    own = [e for e in rest if e["type"].startswith("diptych:")]
    assert [e["type"] for e in own] == ["diptych:migration", "diptych:energy"]
    assert own[0]["attempt"] == 2
    assert own[1]["joules"] == {"prefill": 1.5, "decode": 0.5, "total": 2.0}
    assert own[1]["energy_source"]
    assert rest[-1]["type"] == "response.completed"


async def test_numbers_are_those_without_own_events(run_stack: Any) -> None:
    gate = Gate()
    gate.open.set()
    async with run_stack(gate) as stack, opened(stack) as connection:
        await create(connection)
        plain = await turn(connection)
        assert not [e for e in plain if e["type"].startswith("diptych:")]
        await tell_queue(stack, 4)
        await create(connection, **WANTED)
        events = await turn(connection)
        numbers = [e["sequence_number"] for e in events]
        assert numbers == sorted(numbers)
        kept = [e for e in events if not e["type"].startswith("diptych:")]
        assert len(kept) < len(events)
        assert [(e["type"], e["sequence_number"]) for e in kept] == [
            (e["type"], e["sequence_number"]) for e in plain
        ]
        for place, event in enumerate(events):
            if event["type"].startswith("diptych:"):
                before = [e["sequence_number"] for e in events[:place]]
                assert event["sequence_number"] == before[-1]
                rest = await stack.read(f"/v1/responses/{event['response_id']}", after=before[-1])
                later = [e for e in events[place:] if e in kept]
                assert [e["sequence_number"] for _, e in rest[:-1]] == [
                    e["sequence_number"] for e in later
                ]


async def test_nobody_is_told_where_no_scheduler_reports(run_stack: Any) -> None:
    gate = Gate()
    gate.open.set()
    async with run_stack(gate) as stack, opened(stack) as connection:
        await create(connection, **WANTED)
        types = [e["type"] for e in await turn(connection)]
        assert "diptych:queue" not in types
        assert "diptych:energy" in types


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
async def test_over_http_there_are_none(stack: Any, path: str) -> None:
    body = stack.body(**WANTED) if "chat" in path else stack.asked(**WANTED)
    response = await stack.client.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "diptych.events")


async def test_the_stock_client_reads_past_them(run_stack: Any) -> None:
    gate = Gate()
    gate.open.set()
    async with (
        run_stack(gate) as stack,
        AsyncOpenAI(base_url=stack.base_url, api_key="none") as client,
        client.responses.connect() as connection,
    ):
        frame: Any = {"type": "response.create", "model": "tiny", "input": "Hello", **WANTED}
        await connection.send(frame)
        text, own, last = "", [], None
        async for event in connection:
            text += event.delta if event.type == "response.output_text.delta" else ""
            if str(event.type).startswith("diptych:"):
                own.append(event.type)
            last = event
            if event.type == "response.completed":
                break
        assert text == "Hello world"
        assert "diptych:energy" in own
        assert last is not None
        assert last.response.output_text == "Hello world"  # type: ignore[union-attr]

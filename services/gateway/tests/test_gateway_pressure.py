"""Refusals name a computed time; nothing hangs; what was not stored leaves nothing behind."""

import asyncio
import dataclasses
import json
import time
from typing import Any

import pytest

from diptych_contracts import subjects
from diptych_contracts.fleet import ClassQueue, QueueLoad
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import PriorityClass, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS, REQUESTS, RESPONSES
from diptych_gateway.settings import GatewaySettings
from diptych_policy.queue_view import QueueView

SCHEDULER = Incarnation("scheduler-1")
INTERACTIVE, STANDARD, BATCH = PriorityClass


@pytest.fixture(autouse=True)
def reports_stay_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a minute: a busy machine may take longer than their two seconds."""
    recent = QueueView._recent
    monkeypatch.setattr(
        QueueView, "_recent", lambda view, now_s, within_s: recent(view, now_s, max(within_s, 60))
    )


async def report(stack: Any, **load: Any) -> None:
    """What a scheduler says of its queue; `waiting` and `gap_s` by class."""
    waiting, gap_s = load.pop("waiting", {}), load.pop("gap_s", {})
    classes = tuple(
        ClassQueue(priority_class=c, waiting=waiting.get(c, 0), gap_s=gap_s.get(c, 0.0))
        for c in PriorityClass
    )
    message = QueueLoad(
        scheduler=SCHEDULER, max_queued=load.pop("max_queued", 1024), classes=classes, **load
    )
    await stack.fleet.bus.publish(subjects.queue(SCHEDULER), message)
    await stack.fleet.bus.flush(1)
    queues = stack.gateway.admission.queues
    await stack.until(lambda: queues._loads.get(SCHEDULER, (None,))[0] == message)


def refusal(response: Any) -> tuple[int, str, int]:
    return (
        response.status_code,
        response.json()["error"]["code"],
        int(response.headers["retry-after"]),
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (503, "no_capacity", 80)),
        ({"diptych": {"priority_class": "standard"}}, (200, None, None)),
        ({"service_tier": "flex"}, (200, None, None)),
    ],
    ids=["interactive", "standard", "batch"],
)
async def test_what_would_expire_is_refused_with_the_time_its_class_takes(
    stack: Any, asked: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    await report(stack, waiting={INTERACTIVE: 39}, gap_s={INTERACTIVE: 2.0})
    response = await stack.chat(**asked)
    if response.status_code == 200:
        assert expected[0] == 200
    else:
        assert refusal(response) == expected
        assert "about 80 s" in response.json()["error"]["message"]
        assert stack.fleet.requests == []


async def test_each_class_has_its_own_pace(stack: Any) -> None:
    await report(stack, waiting={INTERACTIVE: 2, BATCH: 99}, gap_s={INTERACTIVE: 1.0, BATCH: 30.0})
    assert (await stack.chat()).status_code == 200
    assert refusal(await stack.chat(service_tier="flex")) == (503, "no_capacity", 120)


async def test_who_was_let_in_since_the_last_report_waits_too(stack: Any) -> None:
    await report(stack, waiting={INTERACTIVE: 29}, gap_s={INTERACTIVE: 2.0})
    assert (await stack.chat()).status_code == 200
    assert refusal(await stack.chat()) == (503, "no_capacity", 62)


async def test_a_queue_keeps_room_for_what_cannot_wait(stack: Any) -> None:
    await report(stack, queued=600, waiting={BATCH: 600}, gap_s={BATCH: 0.05})
    assert refusal(await stack.chat(service_tier="flex")) == (429, "queue_full", 31)
    assert (await stack.chat()).status_code == 200
    await report(stack, queued=1024, waiting={INTERACTIVE: 9}, gap_s={INTERACTIVE: 0.5})
    assert refusal(await stack.chat()) == (429, "queue_full", 5)
    answer = await stack.client.post("/v1/responses", json=stack.asked())
    assert refusal(answer) == (429, "queue_full", 5)


async def test_an_old_report_refuses_nobody(stack: Any) -> None:
    await report(stack, queued=1024, waiting={INTERACTIVE: 999}, gap_s={INTERACTIVE: 9.0})
    queues = stack.gateway.admission.queues
    queues._loads = {s: (load, heard_s - 61.0) for s, (load, heard_s) in queues._loads.items()}
    assert (await stack.chat()).status_code == 200


async def no_record(stack: Any, response: Any) -> bool:
    bucket = stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    return await bucket.get(response.headers["x-request-id"]) is None


async def test_a_full_stream_is_told_and_leaves_no_record(stack: Any) -> None:
    await report(stack, waiting={INTERACTIVE: 6}, gap_s={INTERACTIVE: 2.0})
    stream = stack.broker.streams[REQUESTS.name]
    stream.spec = dataclasses.replace(stream.spec, max_bytes=10)
    response = await stack.chat()
    assert refusal(response) == (429, "storage_full", 14)
    streamed = await stack.chat(stream=True)
    assert refusal(streamed) == (429, "storage_full", 14)
    assert await stack.gateway.records.settled(1.0)
    assert await no_record(stack, response)
    assert len(stack.gateway.in_flight) == stack.gateway.admission.in_flight == 0


async def test_an_answer_that_is_not_stored_is_not_kept_for_its_client(stack: Any) -> None:
    stream = stack.broker.streams[REQUESTS.name]
    stream.spec = dataclasses.replace(stream.spec, max_bytes=10)
    response = await stack.client.post(
        "/v1/chat/completions", json=stack.body(), headers={"x-diptych-resume": "1"}
    )
    assert response.status_code == 429
    assert len(stack.gateway.in_flight.keeper) == 0


async def test_full_buckets_are_told_apart(stack: Any) -> None:
    bucket = stack.broker.bucket(RESPONSES)
    bucket._spec = dataclasses.replace(bucket._spec, max_bytes=10)
    assert refusal(await stack.respond()) == (429, "storage_full", 1)
    assert (await stack.respond(store=False)).status_code == 200
    await report(stack, storage_full=True)
    assert refusal(await stack.respond(store=False)) == (429, "storage_full", 1)


async def test_with_the_bus_away_the_accept_deadline_of_the_class_ends_it(
    run_stack: Any, hello: Any
) -> None:
    waited: list[float] = []
    async with run_stack(hello, accept_s=(0.3, 0.3, 0.4)) as stack:
        store = stack.member.bus.store

        async def measured(*args: Any, timeout_s: float, **more: Any) -> Any:
            waited.append(timeout_s)
            return await store(*args, timeout_s=timeout_s, **more)

        stack.member.bus.store = measured
        await report(stack, waiting={INTERACTIVE: 6}, gap_s={INTERACTIVE: 2.0})
        stack.broker.go_away()
        for tier in ("default", "flex"):
            response = await stack.chat(service_tier=tier)
            assert refusal(response) == (503, "unavailable", 14)
        assert waited == [0.3, 0.4]
        stack.broker.come_back()


async def test_a_full_gateway_says_when_the_class_will_have_a_place(
    run_stack: Any,
) -> None:
    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("a")[:1])

    async with run_stack(script, max_in_flight=1) as stack:
        clock = stack.gateway.admission
        for seconds in (30.0, 20.0, 10.0):
            clock._endings[BATCH].append(time.monotonic() - seconds)
            clock._endings[INTERACTIVE].append(time.monotonic() - seconds / 6)
        async with stack.stream():
            await stack.until(lambda: stack.fleet.requests)
            assert refusal(await stack.chat()) == (429, "rate_limit_exceeded", 2)
            assert refusal(await stack.chat(service_tier="flex"))[2] in (10, 11)
            by_name = await stack.chat(diptych={"priority_class": "batch"})
            assert refusal(by_name)[2] in (10, 11)


async def test_one_that_ends_without_a_token_may_be_repeated(run_stack: Any) -> None:
    going_on = asyncio.Event()

    async def script(fleet: Any, request: Any) -> None:
        end = fleet.end(request, EndReason.EXPIRED, 1, None)
        if request.stopping.max_tokens > 1:
            fleet.say(request, fleet.ids("Hello"))
            await going_on.wait()
        fleet.bus.append(request.gateway, end)

    async with run_stack(script) as stack:
        for streamed in (False, True):
            answer = await stack.chat(max_tokens=1, stream=streamed)
            assert answer.status_code == 504
            assert answer.headers["x-should-retry"] == "true"
        async with stack.stream() as response:
            data = []
            async for line in response.aiter_lines():
                data += [line.removeprefix("data: ")] if line.startswith("data: ") else []
                if '"Hello"' in line:
                    going_on.set()
        error = json.loads(data[-1])["error"]
        assert (error["code"], error["headers"]) == ("expired", {"x-should-retry": "false"})
        assert (await stack.chat()).headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("first_token_s", (1.0, 2.0), "expected one value or three"),
        ("accept_s", (0.0,), "more than 0"),
        ("total_s", (3601.0,), "at most 3600"),
    ],
)
def test_deadlines_that_make_no_sense_stop_the_start(
    name: str, value: tuple[float, ...], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        GatewaySettings(**{name: value})  # type: ignore[arg-type]


def test_deadlines_by_class() -> None:
    given = GatewaySettings().deadlines()
    assert [given.accept_s[c] for c in PriorityClass] == [1.0, 2.0, 5.0]
    assert [given.of[c].first_token_s for c in PriorityClass] == [60.0, 300.0, 1800.0]
    assert {given.of[c].inter_token_s for c in PriorityClass} == {5.0}
    assert {given.of[c].transfer_s for c in PriorityClass} == {10.0}


async def test_the_deadlines_of_its_class_travel_in_the_request(stack: Any) -> None:
    await stack.chat(service_tier="flex", max_tokens=5)
    (request,) = stack.fleet.requests
    assert request.priority_class is BATCH
    assert request.deadlines.first_token_s == 1800.0

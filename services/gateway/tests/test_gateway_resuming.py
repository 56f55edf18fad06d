"""Any gateway goes on with an answer, whoever took its request, dead or alive."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from diptych_contracts import subjects
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import EndReason, Fence
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.responses import Attended, StoredResponse
from diptych_contracts.streams import REQUEST_RECORDS, RESPONSES, TOKENS
from diptych_gateway.keeping import resuming

TEXT = "Hello world and all the rest of it"
OTHER = "gateway-00000000cccc"
AN_ENTRY = Fence(request_id=RequestId("another"), attempt=2)


class Story:
    """Says half, and the rest when it is told to go on; with a new attempt in between."""

    def __init__(self) -> None:
        self.going_on = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, fleet: Any, request: Any) -> None:
        ids = fleet.ids(TEXT)
        half = len(ids) // 2
        for index, token in enumerate(ids[:half]):
            fleet.say(request, [token], index=index)
        await self.going_on.wait()
        fleet.fence(request, 2)
        fleet.say(request, [1, 2, 3], index=half, attempt=1)
        fleet.say(request, ids[half:], index=half, attempt=2, end=EndReason.STOP)
        await fleet.bus.flush(2)
        self.ended.set()


def numbers(events: list[Any]) -> list[int]:
    return [event["sequence_number"] for _, event in events if event != "[DONE]"]


def joined(events: list[Any]) -> str:
    return "".join(e["delta"] for _, e in events if e != "[DONE]" and "delta" in e)


async def first_half(stack: Any, until_number: int) -> tuple[str, list[int], str]:
    """Read a stream up to an event and drop the connection; its path, numbers and text."""
    seen, text = [], ""
    async with stack.client.stream(
        "POST", "/v1/responses", json=stack.asked(stream=True)
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                seen.append(event["sequence_number"])
                text += event.get("delta", "")
                if event["sequence_number"] == until_number:
                    break
    return f"/v1/responses/resp_{response.headers['x-request-id']}", seen, text


def attendances(stack: Any) -> Callable[[], Awaitable[None]]:
    """What waits until the first gateway has been told once more of readers elsewhere."""
    heard = asyncio.Event()
    keeper = stack.gateway.in_flight.keeper
    read_elsewhere = keeper.read_elsewhere

    def hear(request_ids: Any) -> None:
        read_elsewhere(request_ids)
        heard.set()

    async def once_more() -> None:
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)
        heard.clear()
        async with asyncio.timeout(60):
            await heard.wait()

    keeper.read_elsewhere = hear
    return once_more


async def test_another_gateway_goes_on_where_the_first_was_killed(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack:
        path, seen, text = await first_half(stack, 6)
        async with stack.another(OTHER) as client:
            coming = asyncio.create_task(stack.read(path, after=6, client=client))
            await asyncio.sleep(0.2)
            story.going_on.set()
            rest = await coming
            whole = await stack.read(path, client=client)
        assert seen + numbers(rest) == numbers(whole) == list(range(len(numbers(whole))))
        assert text + joined(rest) == joined(whole) == TEXT
        assert rest[-2][1]["type"] == "response.completed"
        assert rest[-2][1]["response"]["usage"]["diptych"]["attempt"] == 1


async def test_a_response_that_ended_unread_is_archived_by_whoever_asks(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack:
        path, _, _ = await first_half(stack, 6)
        stack.gateway.in_flight.keeper.drop(stack.fleet.requests[0].request_id)  # as if killed
        story.going_on.set()
        await story.ended.wait()
        bucket = stack.fleet.bus.bucket(RESPONSES, StoredResponse)
        key = path.rsplit("/", 1)[1]
        kept = await bucket.get(key)
        assert kept is not None
        assert kept.value.answer is None
        async with stack.another(OTHER) as client:
            found = (await client.get(path)).json()
            assert found["status"] == "completed"
            assert found["output"][0]["content"][0]["text"] == TEXT

            async def archived() -> Any:
                return (await bucket.get(key)).value.answer

            assert "".join((await stack.until(archived)).deltas) == TEXT
            going_on = await client.post(
                "/v1/responses", json=stack.asked(previous_response_id=key, stream=True)
            )
            assert going_on.status_code == 200


async def test_both_gateways_say_the_same_at_the_same_time(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack, stack.another(OTHER) as client:
        first = asyncio.create_task(stack.respond(stream=True))
        await stack.until(lambda: stack.fleet.requests)
        path = f"/v1/responses/resp_{stack.fleet.requests[0].request_id}"
        second = asyncio.create_task(stack.read(path, client=client))
        await asyncio.sleep(0.1)
        story.going_on.set()
        theirs = await second
        ours = [
            json.loads(line.removeprefix("data: "))
            for line in (await first).text.split("\n")
            if line.startswith("data: {")
        ]
        assert [event for _, event in theirs[:-1]] == ours


async def test_a_reader_elsewhere_keeps_its_gateway_from_cancelling(
    run_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "ATTEND_S", 0.1)
    story = Story()
    async with run_stack(story, resume_grace_s=90.0) as stack, stack.another(OTHER) as client:
        told = attendances(stack)
        path, _, _ = await first_half(stack, 6)
        coming = asyncio.create_task(stack.read(path, after=6, client=client))
        for _ in range(3):
            await told()
            stack.pass_time(40)
        assert await stack.cancelled_or_not(stack.fleet.requests[0]) is None
        story.going_on.set()
        assert TEXT.endswith(joined(await coming))


async def test_a_reader_elsewhere_that_leaves_lets_the_grace_run_out(
    run_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "ATTEND_S", 0.1)
    async with run_stack(Story(), resume_grace_s=90.0) as stack, stack.another(OTHER) as client:
        told = attendances(stack)
        path, _, _ = await first_half(stack, 6)
        request = stack.fleet.requests[0]
        async with client.stream("GET", path, params={"stream": "true"}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            for _ in range(3):
                await told()
                stack.pass_time(40)
            assert await stack.cancelled_or_not(request) is None

        async def given_up() -> Any:
            stack.pass_time(5)
            return await stack.fleet.record(request)

        record = await stack.until(given_up)
        assert record.state is RecordState.CANCELLING


async def test_schedulers_hear_which_orphans_are_read(run_stack: Any) -> None:
    heard: list[Attended] = []
    story = Story()
    async with run_stack(story) as stack, stack.another(OTHER) as client:
        await stack.fleet.bus.subscribe(
            subjects.ATTENDED, lambda delivery: heard.append(delivery.decode(Attended))
        )
        path, _, _ = await first_half(stack, 6)
        coming = asyncio.create_task(stack.read(path, after=6, client=client))
        await stack.until(lambda: heard)
        story.going_on.set()
        await coming
        assert heard[0].reader == OTHER
        assert heard[0].request_ids == (stack.fleet.requests[0].request_id,)


async def test_a_text_that_left_the_journal_is_gone(run_stack: Any) -> None:
    async with run_stack(Story()) as stack:
        path, _, _ = await first_half(stack, 6)
        request = stack.fleet.requests[0]
        stack.gateway.in_flight.keeper.drop(request.request_id)
        bucket = stack.fleet.bus.bucket(RESPONSES, StoredResponse)
        kept = await bucket.get(path.rsplit("/", 1)[1])
        later = msgspec.structs.replace(kept.value, journal_seq=10**6)
        await bucket.update(kept.key, later, kept.revision)
        closed = RequestRecord(
            request_id=request.request_id,
            owner=Incarnation("s"),
            gateway=request.gateway,
            state=RecordState.CLOSED,
        )
        await stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).put(request.request_id, closed)
        async with stack.another(OTHER) as client:
            for params in ({}, {"stream": "true"}):
                answer = await client.get(path, params=params)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    410,
                    "response_expired",
                )


async def test_a_draining_gateway_hands_its_kept_answers_over(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story, drain_s=0.2) as stack, stack.another(OTHER) as client:
        reading = asyncio.create_task(stack.respond(stream=True))
        await stack.until(lambda: stack.fleet.requests and stack.gateway.in_flight.journal_seq)
        await asyncio.sleep(0.1)
        stack.member.stopping.set()
        answer = await reading
        last = answer.text.rstrip().split("\n\n")[-1]
        assert last.startswith("event: error")
        path = f"/v1/responses/resp_{stack.fleet.requests[0].request_id}"
        assert await stack.fleet.record(stack.fleet.requests[0]) is None
        coming = asyncio.create_task(stack.read(path, client=client))
        await asyncio.sleep(0.1)
        story.going_on.set()
        assert joined(await coming) == TEXT


async def test_a_client_is_told_in_time_that_nobody_serves_the_model(run_stack: Any) -> None:
    async with run_stack(Story()) as stack:
        path, _, _ = await first_half(stack, 6)
        bucket = stack.fleet.bus.bucket(RESPONSES, StoredResponse)
        kept = await bucket.get(path.rsplit("/", 1)[1])
        await bucket.update(
            kept.key, msgspec.structs.replace(kept.value, model="gone"), kept.revision
        )
        answer: httpx.Response = await stack.client.get(path, params={"stream": "true"})
        assert answer.status_code == 404


async def forget_the_beginning(stack: Any) -> None:
    """What a full journal, or an aged one, does."""
    tokens = stack.broker.streams[TOKENS.name]
    tokens.erase(tokens.first_seq)


@pytest.mark.parametrize("params", [{"stream": "true"}, {"stream": "true", "starting_after": "6"}])
async def test_a_running_answer_whose_beginning_is_gone_is_refused(
    run_stack: Any, params: dict[str, str]
) -> None:
    """It once hung: what follows a hole can never be shown."""
    story = Story()
    async with run_stack(story) as stack:
        path, _, _ = await first_half(stack, 6)
        request = stack.fleet.requests[0]
        running = RequestRecord(
            request_id=request.request_id,
            owner=Incarnation("s"),
            gateway=request.gateway,
            state=RecordState.ROUTED,
        )
        records = stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        await records.put(request.request_id, running)
        await forget_the_beginning(stack)
        async with stack.another(OTHER) as client:
            answer = await client.get(path, params=params)
            assert answer.status_code == 410
            assert "the resume window has passed" in answer.json()["error"]["message"]
        story.going_on.set()


async def test_an_old_answer_whose_record_has_expired_too_is_gone(run_stack: Any) -> None:
    async with run_stack(Story()) as stack:
        path, _, _ = await first_half(stack, 6)
        await forget_the_beginning(stack)
        async with stack.another(OTHER) as client:
            for params in ({}, {"stream": "true"}):
                assert (await client.get(path, params=params)).status_code == 410


async def test_a_record_says_exactly_where_its_answer_begins(run_stack: Any) -> None:
    """Older entries of others may be gone: that is no hole in this answer."""
    story = Story()
    async with run_stack(story) as stack:
        await stack.fleet.bus.record(Incarnation("elsewhere"), AN_ENTRY, timeout_s=60)
        path, _, _ = await first_half(stack, 6)
        request = stack.fleet.requests[0]
        running = RequestRecord(
            request_id=request.request_id,
            owner=Incarnation("s"),
            gateway=request.gateway,
            state=RecordState.ROUTED,
            journal_seq=1,
        )
        records = stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        await records.put(request.request_id, running)
        await forget_the_beginning(stack)
        async with stack.another(OTHER) as client:
            coming = asyncio.create_task(stack.read(path, client=client))
            await asyncio.sleep(0.1)
            story.going_on.set()
            assert joined(await coming) == TEXT

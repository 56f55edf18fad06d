"""`/v1/responses` over HTTP against a scripted fleet."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState
from diptych_contracts.responses import StoredResponse
from diptych_contracts.streams import RESPONSES

TEXT = "Hello world and all the rest of it"


class Story:
    """A script that says some tokens, and the rest when it is told to go on."""

    def __init__(self, first: int = 2, end: EndReason = EndReason.STOP) -> None:
        self.first = first
        self.end = end
        self.going_on = asyncio.Event()

    async def __call__(self, fleet: Any, request: Any) -> None:
        ids = fleet.ids(TEXT)
        for index, token in enumerate(ids[: self.first]):
            fleet.say(request, [token], index=index)
        await self.going_on.wait()
        for index, token in enumerate(ids[self.first :], start=self.first):
            last = index == len(ids) - 1
            fleet.say(request, [token], index=index, end=self.end if last else None)


async def first_line(response: Any) -> None:
    async with aclosing(response.aiter_lines()) as lines:
        await anext(lines)


def text_of(response: dict[str, Any]) -> str:
    text: str = response["output"][0]["content"][0]["text"]
    return text


def joined(events: list[tuple[str | None, Any]]) -> str:
    return "".join(e["delta"] for _, e in events if e != "[DONE]" and "delta" in e)


async def test_a_whole_response_is_what_was_asked_and_answered(stack: Any, conforms: Any) -> None:
    answer = await stack.respond(
        instructions="Be brief.",
        temperature=0.25,
        top_p=0.5,
        max_output_tokens=9,
        metadata={"who": "me"},
        safety_identifier="s",
        service_tier="auto",
    )
    assert answer.status_code == 200
    response = answer.json()
    conforms(response)
    request = stack.fleet.requests[0]
    assert response["id"] == f"resp_{request.request_id}"
    assert (response["status"], text_of(response)) == ("completed", "Hello world")
    assert (response["instructions"], response["max_output_tokens"]) == ("Be brief.", 9)
    assert (response["temperature"], response["top_p"]) == (0.25, 0.5)
    assert (response["metadata"], response["store"]) == ({"who": "me"}, True)
    assert response["usage"]["output_tokens"] == 2
    assert response["usage"]["diptych"]["link"] == "shm"
    assert request.stopping.max_tokens == 9
    codec = stack.fleet.codec
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert list(request.prompt_ids) == codec.encode(codec.render(asked))


async def test_a_stream_is_every_event_in_order(stack: Any, conforms: Any) -> None:
    response = await stack.respond(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [b for b in response.text.split("\n\n") if b]
    assert blocks[-1] == "data: [DONE]"
    for number, block in enumerate(blocks[:-1]):
        kind, event_id, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        conforms(event)
        assert kind == f"event: {event['type']}"
        assert event_id == f"id: {number}"
        assert event["sequence_number"] == number
    assert event["type"] == "response.completed"
    assert text_of(event["response"]) == "Hello world"


async def test_what_was_streamed_can_be_retrieved_whole_and_as_the_same_stream(
    stack: Any, conforms: Any
) -> None:
    streamed = await stack.respond(stream=True)
    path = f"/v1/responses/resp_{streamed.headers['x-request-id']}"
    whole = (await stack.client.get(path)).json()
    conforms(whole)
    again = await stack.client.get(path, params={"stream": "true"})
    assert again.text == streamed.text
    part = await stack.client.get(path, params={"stream": "true", "starting_after": 4})
    assert streamed.text.endswith(part.text)
    assert part.text.startswith("event: response.output_text.delta\nid: 5\n")
    by_header = await stack.client.get(
        path, params={"stream": "true"}, headers={"last-event-id": "4"}
    )
    assert by_header.text == part.text


async def test_a_running_response_says_so_and_can_be_read_from_any_point(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack:
        reading = asyncio.create_task(stack.respond(stream=True))
        await stack.until(lambda: stack.fleet.requests)
        path = f"/v1/responses/resp_{stack.fleet.requests[0].request_id}"
        stored = (await stack.client.get(path)).json()
        assert (stored["status"], stored["output"]) == ("in_progress", [])
        second = asyncio.create_task(stack.read(path, after=4))
        await stack.until(lambda: len(stack.gateway.in_flight) == 2)
        story.going_on.set()
        first, rest = await reading, await second
        assert first.text.count("event: response.completed") == 1
        numbers = [event["sequence_number"] for _, event in rest[:-1]]
        assert numbers == list(range(5, 5 + len(numbers)))
        assert rest[-2][1]["type"] == "response.completed"


async def test_a_conversation_goes_on_from_its_last_response(stack: Any) -> None:
    first = (await stack.respond(instructions="Rule.")).json()
    second = (await stack.respond(input="And?", previous_response_id=first["id"])).json()
    third = (await stack.respond(input="So?", previous_response_id=second["id"])).json()
    assert third["previous_response_id"] == second["id"]
    codec = stack.fleet.codec
    assert list(stack.fleet.requests[2].prompt_ids) == codec.encode(
        codec.render(
            [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hello world"},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "Hello world"},
                {"role": "user", "content": "So?"},
            ]
        )
    )


async def test_a_response_can_be_built_on_as_soon_as_its_end_is_heard(stack: Any) -> None:
    for _ in range(10):
        async with stack.client.stream("POST", "/v1/responses", json=stack.asked(stream=True)) as r:
            async for line in r.aiter_lines():
                if line.startswith("event: response.completed"):
                    break
        last = f"resp_{r.headers['x-request-id']}"
        assert (await stack.respond(previous_response_id=last)).status_code == 200


async def test_an_unknown_and_a_running_previous_response_are_errors(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story) as stack:
        unknown = await stack.respond(previous_response_id=f"resp_{'0' * 32}")
        assert unknown.status_code == 400
        assert unknown.json()["error"]["code"] == "previous_response_not_found"
        assert unknown.json()["error"]["param"] == "previous_response_id"
        running = (await stack.respond(background=True)).json()
        early = await stack.respond(previous_response_id=running["id"])
        assert (early.status_code, early.json()["error"]["code"]) == (
            409,
            "previous_response_in_progress",
        )
        story.going_on.set()


async def test_a_background_response_needs_no_connection(run_stack: Any, conforms: Any) -> None:
    story = Story()
    async with run_stack(story, resume_grace_s=0.0) as stack:
        answer = await stack.respond(background=True)
        response = answer.json()
        conforms(response)
        assert (response["status"], response["background"]) == ("in_progress", True)
        stack.pass_time(30)
        assert await stack.cancelled_or_not(stack.fleet.requests[0]) is None, "nobody cancelled it"
        story.going_on.set()
        path = f"/v1/responses/{response['id']}"

        async def done() -> Any:
            found = (await stack.client.get(path)).json()
            return found if found["status"] == "completed" else None

        assert text_of(await stack.until(done)) == TEXT


async def test_a_client_that_leaves_may_come_back_within_the_grace(run_stack: Any) -> None:
    story = Story()
    async with run_stack(story, resume_grace_s=30.0) as stack:
        body = stack.asked(stream=True)
        async with stack.client.stream("POST", "/v1/responses", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("id: 5"):
                    break
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)
        path = f"/v1/responses/resp_{response.headers['x-request-id']}"
        coming = asyncio.create_task(stack.read(path, after=4))
        await stack.until(lambda: len(stack.gateway.in_flight) == 1)
        story.going_on.set()
        rest = await coming
        assert rest[0][1]["sequence_number"] == 5
        assert TEXT.endswith(joined(rest))
        assert await stack.fleet.record(stack.fleet.requests[0]) is None


async def test_a_client_that_does_not_come_back_is_cancelled_after_the_grace(
    run_stack: Any,
) -> None:
    async with run_stack(Story(), resume_grace_s=60.0) as stack:
        async with stack.client.stream(
            "POST", "/v1/responses", json=stack.asked(stream=True)
        ) as response:
            await first_line(response)
        request = stack.fleet.requests[0]
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)
        assert await stack.cancelled_or_not(request) is None
        stack.pass_time(61)
        record = await stack.cancelled_or_not(request)
        assert record.state is RecordState.CANCELLING
        assert "did not come back" in record.cancel_reason


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_without_resume_intent_leaving_cancels_at_once(run_stack: Any, endpoint: str) -> None:
    async with run_stack(Story(), resume_grace_s=30.0) as stack:
        body = stack.asked(stream=True, store=False)
        path = "/v1/responses"
        if endpoint == "chat":
            body, path = stack.body(stream=True), "/v1/chat/completions"
        async with stack.client.stream("POST", path, json=body) as response:
            await first_line(response)
        record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
        assert (record.state, record.cancel_reason) == (RecordState.CANCELLING, "the client left")


async def test_a_chat_client_may_ask_for_the_grace_by_header(run_stack: Any) -> None:
    async with run_stack(Story(), resume_grace_s=60.0) as stack:
        body, headers = stack.body(stream=True), {"x-diptych-resume": "1"}
        async with stack.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            await first_line(response)
        request = stack.fleet.requests[0]
        assert request.resume is True
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)
        assert await stack.cancelled_or_not(request) is None
        stack.pass_time(61)
        record = await stack.cancelled_or_not(request)
        assert "did not come back" in record.cancel_reason
        wrong = await stack.client.post(
            "/v1/chat/completions", json=stack.body(), headers={"x-diptych-resume": "maybe"}
        )
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-diptych-resume")


class Cancellable(Story):
    """Ends as a scheduler would once the record says so."""

    async def __call__(self, fleet: Any, request: Any) -> None:
        ids = fleet.ids(TEXT)
        for index, token in enumerate(ids[: self.first]):
            fleet.say(request, [token], index=index)
        while (record := await fleet.record(request)) is None:
            await asyncio.sleep(0.01)
        assert record.state is RecordState.CANCELLING
        end = fleet.end(request, EndReason.CANCELLED, 1, None)
        fleet.bus.append(request.gateway, end)


async def test_cancel_ends_a_response_and_is_said_to_its_readers(
    run_stack: Any, conforms: Any
) -> None:
    async with run_stack(Cancellable()) as stack:
        reading = asyncio.create_task(stack.respond(stream=True))
        await stack.until(lambda: stack.fleet.requests)
        path = f"/v1/responses/resp_{stack.fleet.requests[0].request_id}"
        for _ in range(2):
            response = (await stack.client.post(f"{path}/cancel")).json()
            conforms(response)
            assert response["status"] == "cancelled"
            assert response["incomplete_details"] == {"reason": "cancelled"}
            assert TEXT.startswith(text_of(response))
        streamed = await reading
        assert "event: response.incomplete" in streamed.text
        assert (await stack.client.get(path)).json()["status"] == "cancelled"


async def test_delete_forgets_a_response_and_stops_one_that_runs(run_stack: Any) -> None:
    async with run_stack(Cancellable()) as stack:
        response = (await stack.respond(background=True)).json()
        path = f"/v1/responses/{response['id']}"
        deleted = await stack.client.delete(path)
        assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
        record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
        assert record.state is RecordState.CANCELLING
        await stack.until(lambda: len(stack.gateway.in_flight.keeper) == 0)
        await stack.gateway.archive.settled(2)
        for answer in (await stack.client.get(path), await stack.client.delete(path)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                404,
                "response_not_found",
            )


async def test_what_is_not_stored_is_not_found(stack: Any) -> None:
    response = (await stack.respond(store=False)).json()
    assert (response["store"], response["status"]) == (False, "completed")
    assert (await stack.client.get(f"/v1/responses/{response['id']}")).status_code == 404


@pytest.mark.parametrize(
    "wanted", ["resp_1", "x", f"resp_{'0' * 32}", "resp_%3E", f"resp_{'A' * 32}"]
)
async def test_an_id_that_is_none_is_not_found(stack: Any, wanted: str) -> None:
    for answer in (
        await stack.client.get(f"/v1/responses/{wanted}"),
        await stack.client.post(f"/v1/responses/{wanted}/cancel"),
        await stack.client.delete(f"/v1/responses/{wanted}"),
    ):
        assert answer.status_code == 404, answer.text


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        ({"starting_after": "3"}, "starting_after"),
        ({"mood": "good"}, "mood"),
    ],
)
async def test_a_bad_query_is_named(stack: Any, params: dict[str, str], named: str) -> None:
    response = (await stack.respond()).json()
    answer = await stack.client.get(f"/v1/responses/{response['id']}", params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


async def test_a_number_past_the_end_gives_an_empty_rest(stack: Any) -> None:
    response = (await stack.respond()).json()
    rest = await stack.read(f"/v1/responses/{response['id']}", after=999)
    assert [data for _, data in rest] == ["[DONE]"]


@pytest.mark.parametrize(("reason", "status"), [(EndReason.FAILED, 500), (EndReason.EXPIRED, 504)])
async def test_a_failure_is_an_error_when_whole_and_an_event_when_streamed(
    run_stack: Any, conforms: Any, reason: EndReason, status: int
) -> None:
    story = Story(end=reason)
    story.going_on.set()
    async with run_stack(story) as stack:
        whole = await stack.respond()
        assert whole.status_code == status
        streamed = await stack.respond(stream=True)
        assert "event: response.failed" in streamed.text
        stored = (
            await stack.client.get(f"/v1/responses/resp_{streamed.headers['x-request-id']}")
        ).json()
        conforms(stored)
        assert stored["status"] == "failed"
        assert stored["error"]["code"]
        assert text_of(stored) == TEXT


async def test_a_response_whose_request_is_refused_leaves_nothing(stack: Any) -> None:
    answer = await stack.respond(max_output_tokens=10**6)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    bucket = stack.fleet.bus.bucket(RESPONSES, StoredResponse)
    assert await bucket.get(f"resp_{answer.headers['x-request-id']}") is None


async def test_kept_answers_are_bounded(run_stack: Any) -> None:
    async with run_stack(Story(), max_kept=2) as stack:
        for _ in range(2):
            assert (await stack.respond(background=True)).status_code == 200
        full = await stack.respond(background=True)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert full.headers["retry-after"] == "1"


async def test_errors_of_the_body_are_error_objects(stack: Any) -> None:
    wrong = await stack.respond(input=[{"role": "user", "content": [{"type": "input_image"}]}])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input[0].content[0]")
    missing = await stack.respond(model="nope")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (await stack.client.get("/v1/responses")).status_code == 405

"""`/v1/responses` as a WebSocket, with a plain client: frames, lanes, limits, errors."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.frames import Frame, Opcode

from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState
from diptych_gateway.sockets import responses_socket as sockets
from diptych_gateway.sockets.responses_socket import MAX_IN_FLIGHT, MAX_LANES

TEXT = "Hello world"


class Gate:
    """A script whose answers wait until they are let through, one by one or all."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, fleet: Any, request: Any) -> None:
        ids = fleet.ids(TEXT)
        fleet.say(request, ids[:1])
        await self.open.wait()
        fleet.say(request, ids[1:], index=1, end=EndReason.STOP)


class Socket:
    """A client that sends and reads JSON."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, **frame: Any) -> None:
        await self.connection.send(json.dumps(frame))

    async def create(self, **changes: Any) -> None:
        body = {"model": "tiny", "input": "Hello", **changes}
        await self.send(type="response.create", **body)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            frame = await self.connection.recv()
        assert isinstance(frame, str)
        event: dict[str, Any] = json.loads(frame)
        return event

    async def turn(self) -> list[dict[str, Any]]:
        """All events up to a terminal one."""
        events = [await self.next()]
        while events[-1]["type"] not in TERMINAL:
            events.append(await self.next())
        return events


TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


@asynccontextmanager
async def opened(stack: Any, **options: Any) -> AsyncIterator[Socket]:
    url = stack.base_url.replace("http", "ws") + "/responses"
    async with connect(url, **options) as connection:
        yield Socket(connection)


def error_of(event: dict[str, Any]) -> tuple[int, str]:
    assert event["type"] == "error", event
    return event["status"], event["error"]["code"]


async def test_a_turn_is_the_events_of_http_one_frame_each(stack: Any, conforms: Any) -> None:
    async with opened(stack) as socket:
        await socket.create()
        events = await socket.turn()
    for number, event in enumerate(events):
        conforms(event)
        assert event["sequence_number"] == number
        assert "stream_id" not in event
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    stored = await stack.client.get(f"/v1/responses/{events[0]['response']['id']}")
    assert stored.json() == events[-1]["response"]


async def test_turns_of_one_lane_run_one_after_another(run_stack: Any) -> None:
    gate = Gate()
    async with run_stack(gate) as stack, opened(stack) as socket:
        for _ in range(3):
            await socket.create()
        await stack.until(lambda: stack.fleet.requests)
        await asyncio.sleep(0.1)
        assert len(stack.fleet.requests) == 1
        gate.open.set()
        ids = [[e["response"]["id"] for e in await socket.turn() if "response" in e] for _ in "abc"]
        assert [len(set(turn)) for turn in ids] == [1, 1, 1]
        assert len({turn[0] for turn in ids}) == 3


async def test_lanes_run_side_by_side_and_are_echoed(run_stack: Any, conforms: Any) -> None:
    gate = Gate()
    async with run_stack(gate) as stack, opened(stack) as socket:
        for lane in ("left", "right", "left"):
            await socket.create(stream_id=lane)
        await stack.until(lambda: len(stack.fleet.requests) == 2)
        gate.open.set()
        by_lane: dict[str, list[dict[str, Any]]] = {"left": [], "right": []}
        for _ in range(30):
            event = await socket.next()
            conforms(event)
            by_lane[event["stream_id"]].append(event)
        assert [e["sequence_number"] for e in by_lane["right"]] == list(range(10))
        assert [e["sequence_number"] for e in by_lane["left"]] == [*range(10), *range(10)]


async def test_more_in_flight_than_allowed_is_an_error_and_the_rest_goes_on(
    run_stack: Any, conforms: Any
) -> None:
    gate = Gate()
    async with run_stack(gate) as stack, opened(stack) as socket:
        for lane in range(MAX_IN_FLIGHT + 1):
            await socket.create(stream_id=f"lane-{lane}")
        ended = 0
        refused = None
        gate.open.set()
        while ended < MAX_IN_FLIGHT or refused is None:
            event = await socket.next()
            if event["type"] == "error":
                refused = event
            ended += event["type"] == "response.completed"
        conforms(refused)
        assert error_of(refused) == (429, "websocket_stream_limit_reached")
        assert refused["stream_id"] == f"lane-{MAX_IN_FLIGHT}"


async def test_a_connection_has_a_limited_number_of_lanes(stack: Any) -> None:
    async with opened(stack) as socket:
        for lane in range(MAX_LANES):
            await socket.create(stream_id=f"lane-{lane}")
            await socket.turn()
        await socket.create(stream_id="one-more")
        assert error_of(await socket.next()) == (429, "websocket_stream_limit_reached")
        await socket.create(stream_id="lane-0")
        assert (await socket.turn())[-1]["type"] == "response.completed"


async def test_what_is_not_stored_is_remembered_by_its_connection_only(stack: Any) -> None:
    async with opened(stack) as socket:
        await socket.create(store=False)
        first = (await socket.turn())[-1]["response"]
        await socket.create(store=False, input="And?", previous_response_id=first["id"])
        second = (await socket.turn())[-1]["response"]
        await socket.create(input="So?", previous_response_id=second["id"])
        stored = (await socket.turn())[-1]["response"]
        assert stored["previous_response_id"] == second["id"]
    codec = stack.fleet.codec
    said = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "So?"},
    ]
    assert list(stack.fleet.requests[2].prompt_ids) == codec.encode(codec.render(said))
    assert (await stack.respond(previous_response_id=stored["id"])).status_code == 200
    said += [{"role": "assistant", "content": TEXT}, {"role": "user", "content": "Hello"}]
    assert list(stack.fleet.requests[3].prompt_ids) == codec.encode(codec.render(said))
    async with opened(stack) as other:
        await other.create(previous_response_id=first["id"])
        assert error_of(await other.next()) == (400, "previous_response_not_found")


async def test_a_failed_continuation_evicts_what_it_built_on(stack: Any) -> None:
    async with opened(stack) as socket:
        await socket.create(store=False)
        first = (await socket.turn())[-1]["response"]["id"]
        await socket.create(previous_response_id=first, temperature=9, stream_id="fork")
        assert error_of((await socket.turn())[-1])[0] == 400
        await socket.create(previous_response_id=first, temperature=9)
        assert error_of((await socket.turn())[-1])[0] == 400
        await socket.create(previous_response_id=first)
        assert error_of(await socket.next()) == (400, "previous_response_not_found")


async def test_a_warm_up_says_nothing_and_can_be_built_on(stack: Any, conforms: Any) -> None:
    async with opened(stack) as socket:
        await socket.create(generate=False, store=False)
        events = await socket.turn()
        for event in events:
            conforms(event)
        assert [e["type"] for e in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        assert events[-1]["response"]["output"] == []
        assert events[-1]["response"]["usage"]["output_tokens"] == 0
        assert stack.fleet.requests[0].stopping.max_tokens == 1
        await socket.create(input="Go", previous_response_id=events[0]["response"]["id"])
        assert (await socket.turn())[-1]["type"] == "response.completed"
        codec = stack.fleet.codec
        said = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "Go"}]
        assert list(stack.fleet.requests[1].prompt_ids) == codec.encode(codec.render(said))


async def test_a_stored_warm_up_is_kept_once_its_prompt_was_read(run_stack: Any) -> None:
    gate = Gate()
    async with run_stack(gate) as stack, opened(stack) as socket:
        await socket.create(generate=False)
        response_id = (await socket.next())["response"]["id"]
        path = f"/v1/responses/{response_id}"
        assert (await stack.client.get(path)).status_code == 404
        gate.open.set()
        ended = (await socket.turn())[-1]["response"]
        assert (await stack.client.get(path)).json() == ended
        again = await stack.respond(previous_response_id=response_id)
        assert again.status_code == 200


async def test_a_warm_up_that_fails_or_does_not_fit_is_an_error(run_stack: Any) -> None:
    async def fail(fleet: Any, request: Any) -> None:
        fleet.say(request, [], end=EndReason.FAILED)

    async with run_stack(fail) as stack, opened(stack) as socket:
        await socket.create(generate=False, max_output_tokens=5000)
        assert error_of(await socket.next()) == (400, "context_length_exceeded")
        assert stack.fleet.requests == []
        await socket.create(generate=False)
        assert error_of((await socket.turn())[-1]) == (500, "failed")
        assert stack.gateway.admission.in_flight == 0


async def test_whoever_leaves_a_warm_up_has_cancelled_it(run_stack: Any) -> None:
    async with run_stack(Gate()) as stack:
        async with opened(stack) as socket:
            await socket.create(generate=False)
            await stack.until(lambda: stack.fleet.requests)
        record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
        assert record.state is RecordState.CANCELLING


@pytest.mark.parametrize(
    ("frame", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_type", None),
        ('{"model":"tiny"}', "missing_required_parameter", "type"),
        ('{"type":"response.steer"}', "invalid_value", "type"),
        ('{"type":"response.create","model":"tiny"}', "missing_required_parameter", "input"),
        (
            '{"type":"response.create","model":"tiny","input":"a","mood":1}',
            "unknown_parameter",
            "mood",
        ),
        (
            '{"type":"response.create","model":"tiny","input":"a","stream_id":"a b"}',
            "invalid_stream_id",
            "stream_id",
        ),
        (
            '{"type":"response.create","model":"tiny","input":"a","stream_id":7}',
            "invalid_stream_id",
            "stream_id",
        ),
        (
            '{"type":"response.create","model":"tiny","input":"a","background":true}',
            "unsupported_parameter",
            "background",
        ),
        ('{"type":"response.create","model":"nope","input":"a"}', "model_not_found", "model"),
        (b"\x00", "invalid_json", None),
    ],
)
async def test_a_bad_frame_is_an_error_frame_and_the_socket_stays_open(
    stack: Any, conforms: Any, frame: str | bytes, code: str, param: str | None
) -> None:
    async with opened(stack) as socket:
        await socket.connection.send(frame)
        event = await socket.next()
        conforms(event)
        assert (event["error"]["code"], event["error"]["param"]) == (code, param)
        await socket.create()
        assert (await socket.turn())[-1]["type"] == "response.completed"


async def test_a_message_beyond_the_limit_closes_the_connection(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, max_body_bytes=1000) as stack, opened(stack) as socket:
        await socket.create(instructions="x" * 2000)
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await socket.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_a_drop_cancels_what_is_not_stored_and_keeps_what_is(run_stack: Any) -> None:
    async with run_stack(Gate()) as stack:
        async with opened(stack) as socket:
            await socket.create(store=False, stream_id="a")
            await socket.create(stream_id="b")
            await stack.until(lambda: len(stack.fleet.requests) == 2)
        dropped = next(r for r in stack.fleet.requests if not r.resume)
        kept = next(r for r in stack.fleet.requests if r.resume)
        record = await stack.until(lambda: stack.fleet.record(dropped))
        assert record.state is RecordState.CANCELLING
        assert await stack.fleet.record(kept) is None
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)


async def test_turns_that_wait_in_a_lane_are_dropped_with_the_connection(run_stack: Any) -> None:
    gate = Gate()
    async with run_stack(gate) as stack:
        async with opened(stack) as socket:
            for _ in range(3):
                await socket.create(store=False)
            await stack.until(lambda: stack.fleet.requests)
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)
        gate.open.set()
        await asyncio.sleep(0.1)
        assert len(stack.fleet.requests) == 1
        assert stack.gateway.admission.in_flight == 0


async def test_a_response_of_a_socket_can_be_resumed_over_http(run_stack: Any) -> None:
    gate = Gate()
    async with run_stack(gate) as stack:
        async with opened(stack) as socket:
            await socket.create()
            events = [await socket.next() for _ in range(5)]
        path = f"/v1/responses/{events[0]['response']['id']}"
        gate.open.set()
        rest = await stack.read(path, after=4)
        text = events[4]["delta"] + "".join(e.get("delta", "") for _, e in rest[:-1])
        assert text == TEXT
        assert [e["sequence_number"] for _, e in rest[:-1]] == list(range(5, 10))


LIFE_S = 1234.0


async def test_an_old_connection_takes_no_more_turns_and_closes_when_the_last_is_over(
    run_stack: Any, conforms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    old, sleep = asyncio.Event(), asyncio.sleep

    async def sleeping(delay_s: float, *more: Any) -> Any:
        return await (old.wait() if delay_s == LIFE_S else sleep(delay_s, *more))

    monkeypatch.setattr(asyncio, "sleep", sleeping)
    async with run_stack(gate, socket_life_s=LIFE_S) as stack, opened(stack) as socket:
        await socket.create()
        events = [await socket.next() for _ in range(5)]
        old.set()
        events.append(await socket.next())
        conforms(events[-1])
        assert error_of(events[-1]) == (400, "websocket_connection_limit_reached")
        await socket.create()
        assert error_of(await socket.next()) == (400, "websocket_connection_limit_reached")
        gate.open.set()
        assert (await socket.turn())[-1]["type"] == "response.completed"
        with pytest.raises(websockets.ConnectionClosed):
            await socket.next()


async def test_a_client_that_reads_nothing_is_cut_off(run_stack: Any) -> None:
    async def flood(fleet: Any, request: Any) -> None:
        ids = fleet.ids("word ") * 400
        index = 0
        for _ in range(40):
            fleet.say(request, ids, index=index)
            index += len(ids)
            await asyncio.sleep(0)

    async with run_stack(flood, slow_reader_s=0.5) as stack:
        async with opened(stack, max_queue=1) as socket:
            await socket.create(store=False, max_output_tokens=2000)
            await stack.until(lambda: stack.fleet.requests)
            record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
            assert record.state is RecordState.CANCELLING
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)


async def test_a_full_gateway_says_when_to_come_back(run_stack: Any) -> None:
    gate = Gate()
    async with run_stack(gate, max_in_flight=1) as stack, opened(stack) as socket:
        await socket.create(stream_id="a")
        await stack.until(lambda: stack.fleet.requests)
        await socket.create(stream_id="b")
        refused = await socket.next()
        while refused["type"] != "error":
            refused = await socket.next()
        assert error_of(refused) == (429, "rate_limit_exceeded")
        assert refused["error"]["headers"]["retry-after"] == "1"
        gate.open.set()


async def test_a_draining_gateway_ends_its_sockets(run_stack: Any) -> None:
    async with run_stack(Gate(), drain_s=0.2) as stack, opened(stack) as socket:
        await socket.create()
        for _ in range(5):
            await socket.next()
        stack.member.stopping.set()
        assert error_of(await socket.next()) == (503, "draining")
        with pytest.raises(websockets.ConnectionClosed):
            await socket.next()


async def test_another_path_is_no_socket(stack: Any) -> None:
    url = stack.base_url.replace("http", "ws") + "/nowhere"
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with connect(url):
            pass
    answer = refused.value.response
    assert (answer.status_code, json.loads(answer.body)["error"]["code"]) == (404, "not_found")
    assert answer.headers["x-request-id"]


async def test_a_bad_header_is_refused_before_the_upgrade(stack: Any) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with opened(stack, additional_headers={"x-diptych-resume": "maybe"}):
            pass
    assert refused.value.response.status_code == 400
    assert json.loads(refused.value.response.body)["error"]["param"] == "x-diptych-resume"


async def test_pings_go_both_ways(run_stack: Any, hello: Any) -> None:
    pinged = asyncio.Event()
    async with run_stack(hello, socket_ping_s=1.0) as stack, opened(stack) as socket:
        answer = socket.connection.protocol.recv_frame

        def hear(frame: Frame) -> None:
            if frame.opcode is Opcode.PING:
                pinged.set()
            answer(frame)

        socket.connection.protocol.recv_frame = hear  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            await pinged.wait()
            await (await socket.connection.ping())
        await socket.create()
        assert (await socket.turn())[-1]["type"] == "response.completed"


async def test_a_large_frame_is_judged_off_the_event_loop(stack: Any, monkeypatch: Any) -> None:
    threads = []
    decode_create, check_frame = sockets.decode_create, sockets.check_frame

    def decoded(data: str) -> Any:
        threads.append(threading.current_thread())
        return decode_create(data)

    def checked(frame: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return check_frame(frame, **options)

    monkeypatch.setattr(sockets, "decode_create", decoded)
    monkeypatch.setattr(sockets, "check_frame", checked)
    async with opened(stack) as socket:
        await socket.create(input=[{"role": "user", "content": ""}] * 60_000)
        assert (await socket.next())["error"]["param"] == "input"
        assert threads
        assert threading.main_thread() not in threads

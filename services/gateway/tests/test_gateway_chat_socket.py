"""`/v1/chat/completions` as a WebSocket: SSE's data, one text frame each."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect

from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState
from diptych_gateway.sockets.connections import MAX_IN_FLIGHT

DONE = "[DONE]"


@asynccontextmanager
async def opened(stack: Any, **options: Any) -> AsyncIterator[ClientConnection]:
    url = stack.base_url.replace("http", "ws") + "/chat/completions"
    async with connect(url, **options) as connection:
        yield connection


async def ask(connection: ClientConnection, stack: Any, **changes: Any) -> None:
    await connection.send(json.dumps(stack.body(**changes)))


async def frame(connection: ClientConnection) -> Any:
    async with asyncio.timeout(60):
        text = await connection.recv()
    return text if text == DONE else json.loads(text)


async def answer(connection: ClientConnection) -> list[Any]:
    """All frames up to the end mark, or an error."""
    frames = [await frame(connection)]
    while frames[-1] != DONE and "error" not in frames[-1]:
        frames.append(await frame(connection))
    return frames


def said(frames: list[Any]) -> str:
    chunks = [f for f in frames if f != DONE and f["choices"]]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def error_of(found: Any) -> tuple[int, str]:
    assert found["type"] == "error", found
    return found["status"], found["error"]["code"]


async def test_an_answer_is_what_sse_says_one_frame_each(stack: Any) -> None:
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}, "seed": 1}
    async with opened(stack) as connection:
        await ask(connection, stack, **usage)
        frames = await answer(connection)
    streamed = [data for _, data in await stack.events(**usage)]
    assert said(frames) == "Hello world"
    assert [shape(f) for f in frames] == [shape(f) for f in streamed]
    assert frames[-1] == streamed[-1] == DONE
    assert frames[-2]["usage"]["completion_tokens"] == 2


def shape(found: Any) -> Any:
    """What does not depend on which request it is."""
    if found == DONE:
        return found
    return {**found, "id": "", "created": 0, "usage": bool(found.get("usage"))}


async def test_requests_run_one_after_another(run_stack: Any) -> None:
    go_on = asyncio.Event()

    async def script(fleet: Any, request: Any) -> None:
        await go_on.wait()
        fleet.say(request, fleet.ids("Hello"), end=EndReason.STOP)

    async with run_stack(script) as stack, opened(stack) as connection:
        for _ in range(3):
            await ask(connection, stack)
        await stack.until(lambda: stack.fleet.requests)
        await asyncio.sleep(0.05)
        assert len(stack.fleet.requests) == 1
        go_on.set()
        answers = [await answer(connection) for _ in range(3)]
    assert [said(frames) for frames in answers] == ["Hello"] * 3
    ids = [{f["id"] for f in frames if f != DONE} for frames in answers]
    assert [len(found) for found in ids] == [1, 1, 1]
    assert len(set.union(*ids)) == 3


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("{", 400, "invalid_json"),
        ('{"model":"tiny"}', 400, "missing_required_parameter"),
        ('{"model":"tiny","messages":[{"role":"user","content":"a"}],"stream":false}', 400,
         "unsupported_parameter"),
        ('{"model":"tiny","messages":[{"role":"user","content":"a"}],"n":2}', 400,
         "unsupported_parameter"),
        ('{"model":"tiny","messages":[{"role":"user","content":"a"}],"mood":1}', 400,
         "unknown_parameter"),
        ('{"model":"nope","messages":[{"role":"user","content":"a"}]}', 404, "model_not_found"),
        ('{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":9999}', 400,
         "context_length_exceeded"),
        (b"\x00", 400, "invalid_json"),
    ],
)  # fmt: skip
async def test_an_error_is_a_frame_and_the_socket_stays_open(
    stack: Any, conforms: Any, text: str | bytes, status: int, code: str
) -> None:
    async with opened(stack) as connection:
        await connection.send(text)
        found = await frame(connection)
        conforms(found)
        assert error_of(found) == (status, code)
        await ask(connection, stack)
        assert said(await answer(connection)) == "Hello world"
    assert stack.gateway.admission.in_flight == 0


async def test_a_late_failure_is_the_last_frame_of_its_answer(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("Hello"))
        for _ in range(100):  # turns, in which its client is told
            await asyncio.sleep(0)
        fleet.say(request, [], index=1, end=EndReason.FAILED)

    async with run_stack(script) as stack, opened(stack) as connection:
        await ask(connection, stack)
        frames = await answer(connection)
        assert said(frames[:-1]) == "Hello"
        assert error_of(frames[-1]) == (500, "failed")
        assert frames[-1]["error"]["headers"]["x-should-retry"] == "false"
        await ask(connection, stack)
        assert said((await answer(connection))[:-1]) == "Hello"


async def test_closing_cancels_what_runs_and_drops_what_waits(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("Hello"))

    async with run_stack(script) as stack:
        async with opened(stack) as connection:
            await ask(connection, stack)
            await ask(connection, stack)
            await frame(connection)
        record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
        assert record.state is RecordState.CANCELLING
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)
        assert len(stack.fleet.requests) == 1
        assert stack.gateway.admission.in_flight == 0


async def test_it_has_the_limits_of_the_other_socket(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("Hello"))

    settings = {"max_sockets": 1, "max_body_bytes": 2000, "socket_life_s": 0.5}
    async with run_stack(script, **settings) as stack, opened(stack) as connection:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with opened(stack):
                pass
        assert refused.value.response.status_code == 429
        for _ in range(MAX_IN_FLIGHT + 1):
            await ask(connection, stack)
        frames = [await frame(connection) for _ in range(4)]
        errors = [error_of(f) for f in frames if "error" in f]
        assert errors == [
            (429, "websocket_stream_limit_reached"),
            (400, "websocket_connection_limit_reached"),
        ]
        await connection.send(" " * 3000)
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await frame(connection)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_a_client_that_reads_nothing_is_cut_off(run_stack: Any) -> None:
    async def flood(fleet: Any, request: Any) -> None:
        ids, index = fleet.ids("word ") * 400, 0
        for _ in range(40):
            fleet.say(request, ids, index=index)
            index += len(ids)
            await asyncio.sleep(0)

    async with run_stack(flood, slow_reader_s=0.5) as stack:
        async with opened(stack, max_queue=1) as connection:
            await ask(connection, stack, max_tokens=2000)
            await stack.until(lambda: stack.fleet.requests)
            record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
            assert record.state is RecordState.CANCELLING
        await stack.until(lambda: len(stack.gateway.in_flight) == 0)

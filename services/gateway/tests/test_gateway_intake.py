"""Bodies that are slow, or large, or many: they cost their own client time, and no other."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import diptych_gateway.completions.chat
import diptych_gateway.responses.serving
from diptych_gateway.errors import ApiError
from diptych_gateway.judging.message_checks import MAX_MESSAGES
from diptych_gateway.listening.intake import SMALL_BYTES, Intake
from diptych_gateway.sockets.responses_socket import ResponsesSocket

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
EMPTY = {"role": "user", "content": ""}


async def unfinished(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: 1000\r\n\r\n{{".encode())
    return reader, writer


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_slow_bodies_hold_no_place(run_stack: Any, hello: Any, path: str) -> None:
    async with run_stack(hello, max_in_flight=1) as stack:
        slow = [await unfinished(stack.gateway.server.port, path) for _ in range(3)]
        assert (await stack.chat()).status_code == 200
        assert (await stack.respond()).status_code == 200
        for _, writer in slow:
            writer.close()


def intake_of(app: Any) -> Intake:
    """What reads bodies, within all that is around it."""
    while not hasattr(app, "routes"):
        app = app._app
    found: Intake = next(
        r.app for r in app.routes if isinstance(r.app, ResponsesSocket)
    ).room.intake
    return found


async def test_of_too_many_bodies_the_oldest_gives_way(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, max_bodies=2) as stack:
        slow = []
        for number in (1, 2):
            slow.append(await unfinished(stack.gateway.server.port, CHAT))
            await stack.until(lambda n=number: intake_of(stack.gateway.server.app).reading == n)
        assert (await stack.chat()).status_code == 200
        assert (await slow[0][0].readline()).startswith(b"HTTP/1.1 408")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow[1][0].readline(), 0.05)
        for _, writer in slow:
            writer.close()


async def test_bodies_that_take_too_much_memory_give_way_oldest_first() -> None:
    with ThreadPoolExecutor(1) as executor:
        intake = Intake(executor, max_bodies=1000, max_bytes=1000, timeout_s=60)
        tasks = [asyncio.create_task(intake.read([], half_a_body())) for _ in range(36)]
        await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in tasks] == [True] + [False] * 35
        assert isinstance(tasks[0].exception(), ApiError)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.wait(tasks)
        assert intake.reading == 0


def half_a_body() -> Callable[[], Any]:
    pieces = iter([{"type": "http.request", "body": b" " * 900, "more_body": True}])

    async def receive() -> Any:
        for piece in pieces:
            return piece
        await asyncio.Event().wait()

    return receive


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [EMPTY] * 60_000}, "messages"),
        (CHAT, {"messages": [EMPTY] * (MAX_MESSAGES + 1)}, "messages"),
        (RESPONSES, {"input": [EMPTY] * 60_000}, "input"),
        (RESPONSES, {"input": [EMPTY] * MAX_MESSAGES, "instructions": "a"}, "input"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 60_000}]},
            "messages[0].content",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "text", "text": ""}] * 60_000}]},
            "input[0].content",
        ),
        (CHAT, {"messages": [EMPTY], "tools": [[]] * 1_000_000}, "tools"),
        (RESPONSES, {"input": "a", "tools": [[]] * 1_000_000}, "tools"),
        (CHAT, {"messages": [EMPTY], "metadata": {str(i): "" for i in range(60_000)}}, "metadata"),
    ],
    ids=str.split("messages few-too-many items history parts item-parts tools r-tools metadata"),
)
async def test_more_things_than_anybody_needs_are_refused(
    stack: Any, path: str, body: dict[str, Any], param: str
) -> None:
    response = await stack.client.post(path, json={"model": "tiny", **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 500


@pytest.mark.parametrize(
    "tools", ["[" * 900 + "]" * 900, "[" * 200_000 + "]" * 200_000, '["\\ud800"]']
)
async def test_what_is_not_supported_may_be_as_strange_as_it_likes(stack: Any, tools: str) -> None:
    body = f'{{"model":"tiny","messages":[{{"role":"user","content":"a"}}],"tools":{tools}}}'
    response = await stack.client.post(
        CHAT, content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("module", "name", "path", "field"),
    [
        (diptych_gateway.completions.chat, "check", CHAT, "messages"),
        (diptych_gateway.responses.serving, "check_response", RESPONSES, "input"),
    ],
)
async def test_a_large_body_is_judged_off_the_event_loop(
    stack: Any, monkeypatch: Any, module: Any, name: str, path: str, field: str
) -> None:
    threads = []
    judge: Callable[..., Any] = getattr(module, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return judge(*args, **kwargs)

    monkeypatch.setattr(module, name, noted)
    for text in ("a", "a " * SMALL_BYTES):
        body = {"model": "tiny", field: [{"role": "user", "content": text}]}
        await stack.client.post(path, json=body)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()

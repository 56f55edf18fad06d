"""Floods: whatever clients do, what is held for them is bounded, and others are served."""

import asyncio
import json
import os
import socket
import struct
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from diptych_contracts.journal import EndReason
from diptych_gateway.listening import connections
from diptych_gateway.listening.connections import MAX_FRAGMENTS
from diptych_gateway.listening.unfinished import Unfinished
from diptych_gateway.sockets.budget import Budget
from diptych_gateway.sockets.responses_socket import ResponsesSocket

CREATE = {"type": "response.create", "model": "tiny"}
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def frame(opcode: int, payload: bytes, *, fin: bool = True) -> bytes:
    """One masked frame."""
    mask = os.urandom(4)
    head = bytes([opcode | (0x80 if fin else 0)])
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack("!H", size)
    masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
    return head + length + mask + masked


@asynccontextmanager
async def raw_socket(stack: Any) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
    writer.write(UPGRADE)
    assert b"101" in await reader.readuntil(b"\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_connections_beyond_the_limit_are_told_and_those_there_are_served(
    run_stack: Any, hello: Any
) -> None:
    async with run_stack(hello, max_connections=50) as stack, AsyncExitStack() as held:
        assert (await stack.chat()).status_code == 200  # one is kept alive
        for _ in range(49):
            _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
            held.callback(writer.close)
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"too_many_connections" in answer
            assert b"retry-after: 1\r\n" in answer
        assert (await stack.chat()).status_code == 200
    # and when they have gone there is room again


async def test_web_sockets_have_a_limit_of_their_own(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, max_sockets=2) as stack:
        url = f"{stack.base_url.replace('http', 'ws')}/responses"
        async with connect(url), connect(url):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url)
            response = refused.value.response
            assert response.status_code == 429
            assert 1 <= int(response.headers["retry-after"]) <= 120
            assert json.loads(response.body)["error"]["code"] == "too_many_sockets"
            assert (await stack.chat()).status_code == 200
        await stack.until(lambda: stack.gateway.door.admission.in_flight == 0)
        async with connect(url) as again:
            await again.send(json.dumps(CREATE | {"input": "Hello"}))
            assert json.loads(await again.recv())["type"] == "response.created"


async def test_a_client_that_pings_and_never_reads_is_cut_off(
    stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 64 * 1024)
    pings = frame(0x9, b"x" * 125) * 500
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", stack.gateway.server.port))
        client.sendall(UPGRADE)
        client.setblocking(False)
        loop = asyncio.get_running_loop()

        async def ping() -> None:
            while True:
                await loop.sock_sendall(client, pings)

        async with asyncio.timeout(60):
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                await ping()
    assert (await stack.chat()).status_code == 200


@pytest.mark.parametrize("size", [0, 1])
async def test_a_message_in_too_many_fragments_is_refused(stack: Any, size: int) -> None:
    async with raw_socket(stack) as (reader, writer):
        writer.write(frame(0x1, b"{", fin=False))
        for _ in range(MAX_FRAGMENTS + 1):
            writer.write(frame(0x0, b" " * size, fin=False))
        async with asyncio.timeout(60):
            last = await reader.read()
        assert struct.unpack("!H", last[2:4])[0] == 1009
    assert (await stack.chat()).status_code == 200


def test_unfinished_messages_give_way_oldest_first() -> None:
    gone: list[str] = []

    class Client:
        def __init__(self, name: str) -> None:
            self.name = name

        def give_way(self) -> None:
            gone.append(self.name)

    unfinished = Unfinished(100)
    slow, other, third = Client("slow"), Client("other"), Client("third")
    unfinished.grown(slow, 40)
    unfinished.grown(other, 40)
    unfinished.grown(slow, 20)
    assert gone == []
    unfinished.grown(third, 1)
    assert (gone, unfinished.total_bytes) == (["slow"], 41)
    unfinished.taken(other)
    unfinished.taken(other)
    assert unfinished.total_bytes == 1
    unfinished.grown(third, 100)
    assert (gone, unfinished.total_bytes) == (["slow", "third"], 0)


async def test_half_messages_of_many_sockets_give_way(run_stack: Any, hello: Any) -> None:
    """64 largest messages fit; the one that has been under way longest is closed (1013)."""
    async with run_stack(hello, max_body_bytes=1000) as stack, AsyncExitStack() as held:
        clients = []
        for _ in range(72):
            reader, writer = await held.enter_async_context(raw_socket(stack))
            writer.write(frame(0x1, b"x" * 900, fin=False))
            clients.append(reader)
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            last = await clients[0].read()
        assert struct.unpack("!H", last[2:4])[0] == 1013
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(clients[-1].read(), 0.1)


async def test_turns_that_wait_share_what_memory_there_is(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        await fleet.go_on.wait()
        fleet.say(request, fleet.ids("Hello"), end=EndReason.STOP)

    async with run_stack(script, max_body_bytes=3000) as stack:
        stack.fleet.go_on = asyncio.Event()
        url = f"{stack.base_url.replace('http', 'ws')}/responses"
        text = json.dumps(CREATE | {"input": "a" * 2000, "store": False})
        too_many = 4 * 16 - 32 * 3000 // len(text)
        refused: list[Any] = []

        async def read(client: Any) -> None:
            while True:
                if (event := json.loads(await client.recv()))["type"] == "error":
                    refused.append(event)

        async with AsyncExitStack() as held:
            sockets = [
                await held.enter_async_context(connect(url, max_queue=None)) for _ in range(4)
            ]
            reading = [asyncio.create_task(read(client)) for client in sockets]
            for client in sockets:
                for _ in range(16):
                    await client.send(text)
            await stack.until(lambda: len(refused) >= too_many)
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)
        assert len(refused) == too_many, "whoever's they are"
        for event in refused:
            assert event["status"] == 429
            assert 1 <= int(event["error"]["headers"]["retry-after"]) <= 120
        stack.fleet.go_on.set()
        budget = _waiting(stack.gateway.server.app)
        await stack.until(lambda: budget.used == 0)


def _waiting(app: Any) -> Budget:
    found: Budget = _socket_route(app).room.waiting
    return found


def _socket_route(app: Any) -> Any:
    """What serves WebSockets of the Responses API, within all that is around it."""
    while not hasattr(app, "routes"):
        app = app._app
    return next(r.app for r in app.routes if isinstance(r.app, ResponsesSocket))


async def test_conversations_that_find_no_room_are_not_remembered(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("Hello"), end=EndReason.STOP)

    async with run_stack(script) as stack:
        remembered = _socket_route(stack.gateway.server.app).remembered
        remembered.limit = 300
        url = f"{stack.base_url.replace('http', 'ws')}/responses"

        async def turn(client: Any, previous: str | None = None) -> str:
            asked = {"input": "a" * 200, "store": False, "previous_response_id": previous}
            await client.send(json.dumps(CREATE | asked))
            while True:
                event = json.loads(await client.recv())
                if event["type"] == "error":
                    return str(event["error"]["code"])
                if event["type"] == "response.completed":
                    return str(event["response"]["id"])

        async with connect(url) as one, connect(url) as two:
            first = await turn(one)
            assert remembered.used == 205
            other = await turn(two)
            assert await turn(two, other) == "previous_response_not_found"
            second = await turn(one)
            assert await turn(one, first) == "previous_response_not_found", "it gave way"
            assert (await turn(one, second)).startswith("resp_")
        await stack.until(lambda: remembered.used == 0)


async def read_all(client: Any) -> None:
    while True:
        await client.recv()


async def test_a_reader_of_many_streams_that_reads_nothing_is_cut_off_on_a_socket(
    run_stack: Any,
) -> None:
    async def script(fleet: Any, request: Any) -> None:
        for index in range(0, 20_000, 500):
            fleet.say(request, fleet.ids("a") * 500, index=index)
            await asyncio.sleep(0)

    async with run_stack(script, slow_reader_s=0.5) as stack:
        url = f"{stack.base_url.replace('http', 'ws')}/responses"
        async with connect(url, max_queue=1) as client:
            client.transport.pause_reading()
            for lane in "abcd":
                asked = {"input": "Hello", "stream_id": lane, "store": False}
                await client.send(json.dumps(CREATE | asked))
            await stack.until(lambda: len(stack.fleet.requests) == 4)
            await stack.until(lambda: len(stack.gateway.in_flight) == 0)
            client.transport.resume_reading()
            with pytest.raises(ConnectionClosed):
                await read_all(client)


async def test_who_asks_for_much_and_reads_nothing_is_cut_off(run_stack: Any, hello: Any) -> None:
    """Once held for as long as a client liked: 150 that read no file held 180 MB."""
    many = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 60  # some MB
    async with run_stack(hello, slow_reader_s=0.3) as stack:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", stack.gateway.server.port, limit=1024
        )
        writer.write(many)
        connections_there = stack.gateway.server._server.server_state.connections
        async with asyncio.timeout(60):
            while not connections_there:
                await asyncio.sleep(0.01)
            while connections_there:
                await asyncio.sleep(0.01)
        writer.close()


async def test_who_does_not_read_a_file_is_cut_off_and_frees_its_place(
    run_stack: Any, hello: Any
) -> None:
    async with run_stack(hello, slow_reader_s=0.3, max_downloads=1) as stack:
        form = {"files": {"file": ("in", bytes(16 << 20))}, "data": {"purpose": "batch"}}
        file_id = (await stack.client.post("/v1/files", **form)).json()["id"]
        path = f"/v1/files/{file_id}/content"
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", stack.gateway.server.port, limit=1024
        )
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        async with asyncio.timeout(60):
            assert b" 200 " in await reader.readline()  # it has the only place
            while (await stack.client.get(path)).status_code == 429:
                await asyncio.sleep(0.05)
        writer.close()

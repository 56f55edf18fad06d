"""Connecting again fails between the server's first word and the client's last one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.aio.msg import Msg

from diptych_bus.jetstream import transport
from diptych_bus.jetstream.client import IdentifiedClient
from diptych_bus.jetstream.connection import Connection
from diptych_contracts.errors import BusAway

INFO = b'INFO {"server_id":"a","version":"2.11.0","max_payload":1048576,"headers":true}\r\n'
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def pong(writer: asyncio.StreamWriter) -> None:
    writer.write(b"PONG\r\n")


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()


class Server:
    """As much of a NATS server as a connection takes; what it says to a first PING is given."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.answers: list[Answer] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(INFO)
        answer = self.answers.pop(0) if self.answers else pong
        while line := await reader.readline():
            if line.startswith(b"PING"):
                await answer(writer)
                answer = pong

    def drop(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()
    server.drop()


class Heard:
    """What went wrong, and how often it was there again."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.back = 0

    async def error(self, err: Exception) -> None:
        self.errors.append(str(err))

    async def reconnected(self) -> None:
        self.back += 1


@asynccontextmanager
async def joined(server: Server, heard: Heard) -> AsyncIterator[IdentifiedClient]:
    client = IdentifiedClient()
    await client.connect_as(
        server.url,
        error_cb=heard.error,
        reconnected_cb=heard.reconnected,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.01,
    )
    try:
        yield client
    finally:
        await client.close()


def going_on() -> Counter[str]:
    """nats-py's tasks that are not being stopped."""
    names = (
        task.get_coro().__qualname__  # type: ignore[union-attr]
        for task in asyncio.all_tasks()
        if not task.cancelling()
    )
    return Counter(name for name in names if name.startswith("Client."))


ONE_CONNECTION = Counter({f"Client._{name}": 1 for name in ("read_loop", "ping_interval", "flusher")})


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_connection_that_breaks_while_it_is_made_leaves_no_task_behind(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each such break left one more that pings: three find a server slow that is not."""
    heard, broken = Heard(), 0
    async with joined(server, heard) as client:
        drain = transport.AbortingTransport.drain

        async def reset(self: transport.AbortingTransport) -> None:
            nonlocal broken
            if client.is_connected and broken < 3:
                broken += 1
                raise ConnectionResetError("Connection lost")
            await drain(self)

        server.drop()
        monkeypatch.setattr(transport.AbortingTransport, "drain", reset)
        await until(lambda: heard.back)
        assert broken == 3
        assert client.is_connected
        await until(lambda: going_on() == ONE_CONNECTION)


async def test_a_server_that_leaves_in_place_of_its_first_answer_is_asked_again(
    server: Server,
) -> None:
    heard = Heard()
    server.answers = [leave, pong, leave, leave]
    async with joined(server, heard) as client:
        assert client.is_connected
        assert heard.errors == ["nats: the server left without a word"]
        server.drop()
        await until(lambda: heard.back)
        assert client.is_connected
        assert heard.errors.count("nats: the server left without a word") == 3
        await until(lambda: going_on() == ONE_CONNECTION)


async def test_a_bug_while_it_connects_again_ends_it_and_is_no_standstill(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await Connection.open(server.url, name="t", wait_s=60.0)

    async def bug(self: IdentifiedClient) -> None:
        self._status = IdentifiedClient.CONNECTING
        raise RuntimeError("read() called while another coroutine is already waiting")

    monkeypatch.setattr(IdentifiedClient, "_process_connect_init", bug)
    server.drop()
    async with asyncio.timeout(60):
        assert isinstance(await connection.lifetime.closed, BusAway)
    assert isinstance(connection.client._reconnection_task.exception(), RuntimeError)
    await connection.close()


async def test_a_slow_server_is_given_longer_with_each_try(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await Connection.open(server.url, name="t", wait_s=60.0)
    given: list[float] = []

    async def unanswered(_: str, __: bytes, ___: object, timeout_s: float) -> Msg:
        given.append(timeout_s)
        if len(given) == 5:
            return Msg(connection.client)
        raise TimeoutError

    monkeypatch.setattr(connection, "_ask_once", unanswered)
    await connection.ask("a", timeout_s=600.0)
    assert given == [0.5, 1.0, 2.0, 2.0, 2.0]
    await connection.close()

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from diptych_bus.jetstream import transport
from diptych_bus.jetstream.client import IdentifiedClient

INFO = b'INFO {"server_id":"a","version":"2.11.0","max_payload":1048576,"headers":true}\r\n'
FAR_S = 60.0


class Server:
    """As much of a NATS server as a connection takes."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.reads = True
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(INFO)
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
                if not self.reads:
                    await asyncio.Event().wait()

    def drop(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


@asynccontextmanager
async def serving(*, reads: bool = True) -> AsyncIterator[Server]:
    server = Server()
    server.reads = reads
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        server.drop()


async def quiet(_: Exception) -> None:
    pass


async def until(holds: Any) -> None:
    async with asyncio.timeout(FAR_S):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_closed_client_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait_for` before Python 3.12, where the refusal comes together with the cancellation."""
    tries = 0

    async def connect(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        try:
            await asyncio.sleep(FAR_S)
        except asyncio.CancelledError:
            raise ConnectionRefusedError from None

    async with serving() as server:
        client = IdentifiedClient()
        await client.connect_as(server.url, error_cb=quiet, max_reconnect_attempts=-1)
        monkeypatch.setattr(transport.TcpTransport, "connect", connect)
        client._server_pool[0].last_attempt = None
        server.drop()
        await until(lambda: tries)
        healing = client._reconnection_task
        await client.close()

    assert client.is_closed
    assert healing.done()
    assert tries == 1


async def test_a_client_closed_just_when_it_came_back_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's last word of the new connection comes together with the cancellation."""
    done = IdentifiedClient._process_connect_init
    coming = asyncio.Event()

    async def late(self: IdentifiedClient) -> None:
        coming.set()
        try:
            await asyncio.sleep(FAR_S)
        except asyncio.CancelledError:
            await done(self)

    async with serving() as server:
        client = IdentifiedClient()
        await client.connect_as(
            server.url, error_cb=quiet, max_reconnect_attempts=-1, reconnect_time_wait=0.01
        )
        monkeypatch.setattr(IdentifiedClient, "_process_connect_init", late)
        server.drop()
        async with asyncio.timeout(FAR_S):
            await coming.wait()
        await client.close()

        assert client.is_closed
        assert client._reading_task.done() or client._reading_task.cancelling()
        assert client._reconnection_task.done()


@pytest.mark.parametrize(
    "said",
    [
        "Maximum Payload Violation",
        "maximum subscriptions exceeded",
        "Authorization Violation",
        "User Authentication Revoked",
        "Stale Connection",
        "Unknown Protocol Operation",
    ],
)
async def test_whatever_a_server_ends_a_connection_with_another_follows(said: str) -> None:
    """The first is what a worker hears that sends while its signing key is retired."""
    heard: list[Exception] = []

    async def hear(err: Exception) -> None:
        heard.append(err)

    async with serving() as server:
        client = IdentifiedClient()
        await client.connect_as(
            server.url, error_cb=hear, max_reconnect_attempts=-1, reconnect_time_wait=0.01
        )
        server.writers[0].write(f"-ERR '{said}'\r\n".encode())
        await until(lambda: len(server.writers) == 2 and client.is_connected)
        assert said.lower() in str(heard[0]).lower()
        await client.close()


async def test_after_what_is_not_allowed_the_connection_goes_on() -> None:
    heard: list[Exception] = []

    async def hear(err: Exception) -> None:
        heard.append(err)

    async with serving() as server:
        client = IdentifiedClient()
        await client.connect_as(server.url, error_cb=hear)
        server.writers[0].write(b"-ERR 'Permissions Violation for Publish to \"a\"'\r\n")
        await until(lambda: heard)
        await client.flush()
        assert len(server.writers) == 1
        await client.close()


async def test_leaving_a_server_that_reads_no_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LEAVE_S", 0.05)
    async with serving(reads=False) as server:
        client = IdentifiedClient()
        await client.connect_as(server.url, error_cb=quiet, pending_size=1 << 30)
        writer = client._transport._io_writer
        while not writer.transport.get_write_buffer_size():
            await client.publish("a", bytes(1_000_000))
            await asyncio.sleep(0)
        await client.publish("a", bytes(1_000_000))
        assert client.pending_data_size
        leaving = asyncio.create_task(client.close())
        done, _ = await asyncio.wait({leaving}, timeout=FAR_S)
        assert done, "it waits for ever"

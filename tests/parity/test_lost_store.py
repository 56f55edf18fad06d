"""A server whose streams are others than before: the bus is gone for good, and says why."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.server import NatsServer
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import Fence
from diptych_contracts.streams import EVENTS, LEASES, TOKENS
from diptych_testkit.nats import running_nats

GATEWAY = Incarnation("gateway-1")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with running_nats(tmp_path / "nats") as running:
        yield running


async def connect(server: NatsServer) -> JetStreamBus:
    return await JetStreamBus.connect(server.url, name="test", wait_s=60)


async def reason(bus: JetStreamBus) -> str:
    async with asyncio.timeout(60):
        await asyncio.wait([bus.closed])
    return str(bus.closed.result())


@pytest.mark.parametrize("stream", [TOKENS.name, f"KV_{LEASES.name}"])
async def test_a_stream_or_bucket_is_deleted(server: NatsServer, stream: str) -> None:
    bus, operator = await connect(server), await nats.connect(server.url)
    await operator.jetstream(timeout=60).delete_stream(stream)
    assert stream in await reason(bus)
    await operator.close()
    await bus.close()


async def test_the_server_comes_back_with_an_empty_store(server: NatsServer) -> None:
    buses = [await connect(server) for _ in range(2)]
    await server.kill()
    shutil.rmtree(server.store / "jetstream")
    await server.start()
    for bus in buses:
        assert EVENTS.name in await reason(bus)
        await bus.close()
    another = await connect(server)
    assert await another.record(GATEWAY, _fence(), timeout_s=60) == 1
    await another.close()


async def test_streams_made_anew_are_not_those_of_before(server: NatsServer) -> None:
    """A member that is told late finds all streams there, and numbers that begin at 1."""
    bus = await connect(server)
    await server.kill()
    shutil.rmtree(server.store / "jetstream")
    await server.start()
    another = await connect(server)
    assert EVENTS.name in await reason(bus)
    assert not another.closed.done()
    await bus.close()
    await another.close()


async def test_a_restart_with_its_store_and_a_purge_are_no_loss(server: NatsServer) -> None:
    bus, operator = await connect(server), await nats.connect(server.url)
    await bus.record(GATEWAY, _fence(), timeout_s=60)
    await operator.jetstream(timeout=60).purge_stream(TOKENS.name)
    await operator.close()
    await server.kill()
    await server.start()
    assert await bus.record(GATEWAY, _fence(), timeout_s=60) == 2
    await asyncio.sleep(1.5)  # longer than both looks take
    assert not bus.closed.done()
    await bus.close()


def _fence() -> Fence:
    return Fence(request_id=RequestId("r"), attempt=2)

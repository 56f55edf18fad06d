"""Three servers keep every stream: the loss of one loses nothing that was acknowledged."""

import asyncio
import time
from pathlib import Path

import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_contracts.errors import Transient
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import TokenEntry, TokenFrame
from diptych_testkit.nats import NatsCluster, running_cluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

GATEWAY = Incarnation("gateway-1")


async def connected(cluster: NatsCluster, number: int) -> JetStreamBus:
    """A bus at one server, once the cluster has found its leader."""
    give_up_s = time.monotonic() + 120
    while True:
        try:
            url = cluster.urls[number]
            return await JetStreamBus.connect(url, name="test", wait_s=5.0, replicas=3)
        except Transient:
            assert time.monotonic() < give_up_s
            await asyncio.sleep(0.5)


def frame(index: int) -> TokenFrame:
    entry = TokenEntry(request_id=RequestId("r1"), attempt=1, index=index, token_ids=(index,))
    return TokenFrame(worker=Incarnation("w-1"), entries=(entry,))


async def stored(bus: JetStreamBus, indices: range) -> None:
    for index in indices:
        async with asyncio.timeout(60):
            while True:
                try:
                    await bus.record(GATEWAY, frame(index), timeout_s=5.0)
                    break
                except Transient:
                    await asyncio.sleep(0.1)


async def read(bus: JetStreamBus) -> set[int]:
    indices = set()
    async for item in bus.read(GATEWAY, after_seq=0):
        assert isinstance(item.entry, TokenFrame)
        indices.add(item.entry.entries[0].index)
    return indices


async def test_the_loss_of_one_server_of_three_loses_nothing(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        bus = await connected(cluster, 0)
        await stored(bus, range(100))
        cluster.kill(0)
        await stored(bus, range(100, 200))
        other = await connected(cluster, 1)
        async with asyncio.timeout(60):  # who is read may not have heard yet what the most know
            while await read(other) != set(range(200)):
                await asyncio.sleep(0.1)
        await other.close()
        await bus.close()

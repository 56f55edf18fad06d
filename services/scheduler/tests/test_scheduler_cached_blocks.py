import asyncio
from collections.abc import AsyncIterator

import pytest

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.port import Delivery
from diptych_contracts import subjects
from diptych_contracts.blocks import BlocksChanged, BlocksSnapshot
from diptych_contracts.ids import Incarnation
from diptych_policy.prefix_index import PrefixIndex
from diptych_scheduler.cached_blocks import CachedBlocks

ME, W = Incarnation("scheduler-1"), Incarnation("w")


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBroker().connect("both")
    yield bus
    await bus.close()


class Worker:
    """Answers with what it holds."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.asked = 0
        self.snapshot = BlocksSnapshot(worker=W, event_id=3, stored=(1, 2, 3))

    async def answer(self, _delivery: Delivery) -> BlocksSnapshot:
        self.asked += 1
        return self.snapshot

    async def announce(self, event_id: int, *stored: int) -> None:
        event = BlocksChanged(worker=W, event_id=event_id, stored=stored)
        await self.bus.publish(subjects.blocks(W), event)
        await self.bus.flush(1)
        await asyncio.sleep(0.02)


async def test_a_worker_is_asked_once_when_it_is_met_and_again_after_a_gap(bus: MemoryBus) -> None:
    worker, index = Worker(bus), PrefixIndex()
    await bus.serve(subjects.control(W), worker.answer)
    async with asyncio.TaskGroup() as tasks:
        cached = CachedBlocks(bus, index, tasks, ME)
        await cached.listen()
        cached.registered(W)
        cached.registered(W)
        await asyncio.sleep(0.02)
        cached.registered(W)
        assert (worker.asked, index.overlap_blocks(W, (1, 2, 3))) == (1, 3)
        await worker.announce(4, 4)
        assert (worker.asked, index.overlap_blocks(W, (1, 2, 3, 4))) == (1, 4)
        worker.snapshot = BlocksSnapshot(worker=W, event_id=6, stored=(9,))
        await worker.announce(6, 6)
        assert (worker.asked, index.overlap_blocks(W, (9,))) == (2, 1)


async def test_a_worker_that_does_not_answer_is_left_alone(bus: MemoryBus) -> None:
    index = PrefixIndex()
    async with asyncio.TaskGroup() as tasks:
        cached = CachedBlocks(bus, index, tasks, ME)
        await cached.listen()
        cached.registered(W)
        await Worker(bus).announce(2, 1)
        cached.stop()
    assert index.overlap_blocks(W, (1,)) == 0


async def test_who_is_heard_after_the_end_is_not_asked(bus: MemoryBus) -> None:
    worker = Worker(bus)
    await bus.serve(subjects.control(W), worker.answer)
    async with asyncio.TaskGroup() as tasks:
        cached = CachedBlocks(bus, PrefixIndex(), tasks, ME)
        await cached.listen()
        cached.stop()
    await worker.announce(2, 1)
    cached.registered(Incarnation("another"))
    assert worker.asked == 0
    assert not bus.closed.done(), "no bug of a handler ended it"

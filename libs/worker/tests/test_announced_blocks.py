import asyncio
from collections.abc import AsyncIterator

import pytest

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.port import Delivery
from diptych_contracts import subjects
from diptych_contracts.blocks import BlocksChanged, BlocksSnapshot
from diptych_contracts.ids import Incarnation
from diptych_policy.prefix_index import PrefixIndex
from diptych_worker.announced_blocks import AnnouncedBlocks

ME = Incarnation("me")


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBroker().connect("me")
    yield bus
    await bus.close()


async def heard(bus: MemoryBus) -> list[BlocksChanged]:
    events: list[BlocksChanged] = []

    def note(delivery: Delivery) -> None:
        events.append(delivery.decode(BlocksChanged))

    await bus.subscribe(subjects.BLOCKS, note)
    return events


async def test_changes_are_gathered_and_numbered(bus: MemoryBus) -> None:
    events, blocks = await heard(bus), AnnouncedBlocks(bus, ME)
    blocks.changed(stored=(1, 2), removed=())
    blocks.changed(stored=(3,), removed=(2,))
    await blocks.announce()
    await blocks.announce()
    blocks.changed(stored=(2,), removed=(1,))
    await blocks.announce()
    await asyncio.sleep(0.02)
    assert events == [
        BlocksChanged(worker=ME, event_id=1, stored=(1, 3)),
        BlocksChanged(worker=ME, event_id=2, stored=(2,), removed=(1,)),
    ]


async def test_what_came_back_before_it_was_told_never_went(bus: MemoryBus) -> None:
    events, blocks = await heard(bus), AnnouncedBlocks(bus, ME)
    blocks.changed(stored=(1,), removed=())
    await blocks.announce()
    blocks.changed(stored=(), removed=(1,))
    blocks.changed(stored=(1,), removed=())
    await blocks.announce()
    await asyncio.sleep(0.02)
    assert len(events) == 1


async def test_a_snapshot_is_what_was_announced(bus: MemoryBus) -> None:
    blocks, index = AnnouncedBlocks(bus, ME), PrefixIndex()
    assert blocks.snapshot() == BlocksSnapshot(worker=ME, event_id=0)
    blocks.changed(stored=(1, 2), removed=())
    await blocks.announce()
    blocks.changed(stored=(3,), removed=(1,))
    assert blocks.snapshot() == BlocksSnapshot(worker=ME, event_id=1, stored=(1, 2))
    index.told(blocks.snapshot())
    await blocks.announce()
    index.told(blocks.snapshot())
    assert index.overlap_blocks(ME, (2, 3)) == 2

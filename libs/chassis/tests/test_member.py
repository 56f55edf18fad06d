import asyncio
from random import Random

from diptych_bus.memory import MemoryBroker
from diptych_chassis.member import Member
from diptych_contracts.ids import Incarnation


def a_member() -> Member:
    return Member(
        service="gateway",
        incarnation=Incarnation("gateway-1"),
        bus=MemoryBroker().connect("gateway-1"),
        rng=Random(0),
    )


async def test_a_standstill_begins_once_it_was_announced() -> None:
    member = a_member()
    member.vitals.beat_sent(1, 0.0)
    still = asyncio.Event()

    async def stand_still() -> None:
        async with member.patience(10.0):
            still.set()
            await asyncio.sleep(0)

    standing = asyncio.create_task(stand_still())
    await asyncio.sleep(0.05)
    assert member.vitals.patience_s == 10.0
    member.vitals.beat_sent(2, 0.1)
    await asyncio.sleep(0.05)
    assert not still.is_set(), "the beat that says so may not have left yet"
    member.vitals.beat_sent(3, 0.2)
    async with asyncio.timeout(60):
        await standing
    assert member.vitals.patience_s == 0.0


async def test_who_never_beat_has_nobody_to_tell() -> None:
    member = a_member()
    async with asyncio.timeout(60), member.patience(10.0):
        assert member.vitals.patience_s == 10.0

"""A scheduler on the memory bus, with no workers: what it does with what it pulls."""

import asyncio

from diptych_bus.memory import MemoryBroker
from diptych_contracts import subjects
from diptych_contracts.dead import DeadLetter
from diptych_contracts.journal import EndReason, Fence
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import DEAD, REQUEST_RECORDS
from diptych_testkit.builders import GATEWAY, MODEL, REQUEST, a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet


async def recorded(fleet: SmallFleet, request_id: str = REQUEST) -> RequestRecord:
    records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    async with asyncio.timeout(5):
        while (kept := await records.get(request_id)) is None:
            await asyncio.sleep(0.01)
    return kept.value


async def test_a_request_gets_one_record_whoever_pulls_it() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler("s1")
        fleet.scheduler("s2")
        await fleet.ready()
        for number in range(8):
            await fleet.client.send(a_request(f"r{number}"))
        owners = {(await recorded(fleet, f"r{number}")).owner for number in range(8)}
        assert owners <= {fleet.incarnation("s1"), fleet.incarnation("s2")}


async def test_what_is_no_request_is_buried_with_the_reason() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await fleet.ready()
        nonsense = Fence(request_id=REQUEST, attempt=1)
        subject = subjects.request("interactive", MODEL)
        await fleet.bus.store(subject, nonsense, msg_id="x", timeout_s=1)
        async with asyncio.timeout(5):
            while (buried := await fleet.bus.stored(DEAD.name, 1)) is None:
                await asyncio.sleep(0.01)
        letter: DeadLetter = buried.decode(DeadLetter)
        assert letter.subject == subject
        assert "expected" in letter.reason


async def test_a_request_that_was_cancelled_before_it_came_is_not_run() -> None:
    async with small_fleet(MemoryBroker()) as fleet:
        records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        cancelled = RequestRecord(
            request_id=REQUEST,
            owner=GATEWAY,
            gateway=GATEWAY,
            state=RecordState.CANCELLING,
            cancel_reason="not accepted in time",
        )
        await records.create(REQUEST, cancelled)
        fleet.scheduler()
        await fleet.ready()
        await fleet.client.send(a_request())
        end = await fleet.client.ended(REQUEST)
        assert (end.reason, end.detail) == (EndReason.CANCELLED, "not accepted in time")
        assert (await fleet.closed(REQUEST)).owner == fleet.incarnation("s1")

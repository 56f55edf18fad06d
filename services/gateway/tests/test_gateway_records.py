"""What a gateway writes into records, and that it loses no race by it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from diptych_bus.memory import MemoryBroker
from diptych_contracts.errors import BusAway
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.sampling import Sampling, Stopping
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_gateway.keeping.records import Records

pytestmark = pytest.mark.virtual_time

GATEWAY = Incarnation("gateway-1")
RID = RequestId("a" * 32)
REQUEST = Request(
    request_id=RID,
    gateway=GATEWAY,
    model="tiny",
    prompt_ids=(1,),
    sampling=Sampling(),
    stopping=Stopping(max_tokens=1),
    created_unix_ms=1000,
)


def record(state: RecordState, attempt: int = 3) -> RequestRecord:
    return RequestRecord(
        request_id=RID,
        owner=Incarnation("scheduler-1"),
        gateway=GATEWAY,
        state=state,
        attempt=attempt,
    )


@asynccontextmanager
async def writer(bus: Any) -> AsyncIterator[Records]:
    made = Records(bus, GATEWAY)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def bus() -> AsyncIterator[Any]:
    made = MemoryBroker().connect("gateway")
    yield made
    await made.close()


async def kept(bus: Any) -> RequestRecord:
    found = await bus.bucket(REQUEST_RECORDS, RequestRecord).get(RID)
    assert found is not None
    value: RequestRecord = found.value
    return value


async def ends(bus: Any) -> list[End]:
    return [item.entry async for item in bus.read(GATEWAY, after_seq=0)]


async def test_a_request_without_a_record_gets_one_that_cancels_it(bus: Any) -> None:
    async with writer(bus) as records:
        records.cancel(REQUEST, "why")
        assert await records.settled(2)
    found = await kept(bus)
    assert bus._broker.bucket(REQUEST_RECORDS).values[RID].expiry is not None
    assert (found.state, found.owner) == (RecordState.CANCELLING, GATEWAY)
    assert found.deadline_unix_ms == 1000 + 3_600_000


async def test_the_owner_keeps_its_record(bus: Any) -> None:
    await bus.bucket(REQUEST_RECORDS, RequestRecord).create(RID, record(RecordState.ROUTED))
    async with writer(bus) as records:
        records.cancel(REQUEST, "why")
        assert await records.settled(2)
    found = await kept(bus)
    assert found == msgspec.structs.replace(
        record(RecordState.ROUTED), state=RecordState.CANCELLING, cancel_reason="why"
    )


@pytest.mark.parametrize("state", [RecordState.ENDING, RecordState.CLOSED])
async def test_what_is_over_stays_over(bus: Any, state: RecordState) -> None:
    await bus.bucket(REQUEST_RECORDS, RequestRecord).create(RID, record(state))
    async with writer(bus) as records:
        records.cancel(REQUEST, "why")
        assert await records.settled(2)
    assert await kept(bus) == record(state)


async def test_an_expired_request_is_marked_first_and_then_ended(bus: Any) -> None:
    await bus.bucket(REQUEST_RECORDS, RequestRecord).create(RID, record(RecordState.ROUTED))
    async with writer(bus) as records:
        records.expire(REQUEST, "silence")
        assert await records.settled(2)
    found = await kept(bus)
    assert found.state is RecordState.ENDING
    (end,) = await ends(bus)
    assert end == found.end
    assert (end.reason, end.attempt) == (EndReason.EXPIRED, 3)


async def test_the_scheduler_that_writes_first_is_read_back(bus: Any) -> None:
    bucket = bus.bucket(REQUEST_RECORDS, RequestRecord)
    await bucket.create(RID, record(RecordState.QUEUED, attempt=1))
    async with writer(bus) as records:
        real_get, raced = records._bucket.get, []

        async def get(key: str) -> Any:
            found = await real_get(key)
            if not raced:
                raced.append(True)
                await bucket.put(RID, record(RecordState.ROUTED, attempt=2))
            return found

        records._bucket.get = get  # type: ignore[method-assign]
        records.cancel(REQUEST, "why")
        assert await records.settled(2)
    found = await kept(bus)
    assert (found.state, found.attempt) == (RecordState.CANCELLING, 2)


async def test_marks_wait_for_the_bus_to_come_back(bus: Any) -> None:
    async with writer(bus) as records:
        real_get, away = records._bucket.get, [True]

        async def get(key: str) -> Any:
            if away.pop() if away else False:
                raise BusAway("away")
            return await real_get(key)

        records._bucket.get = get  # type: ignore[method-assign]
        records.cancel(REQUEST, "why")
        assert await records.settled(2)
    assert (await kept(bus)).state is RecordState.CANCELLING


class Slow:
    """A bus whose calls to the bucket wait to be let through; counts those that wait."""

    def __init__(self, bus: Any) -> None:
        self.bus = bus
        self.through = asyncio.Event()
        self.waiting = 0

    def bucket(self, spec: Any, kind: Any) -> Any:
        self.inner = self.bus.bucket(spec, kind)
        return self

    async def get(self, key: str) -> Any:
        self.waiting += 1
        await self.through.wait()
        return await self.inner.get(key)

    async def create(self, *args: Any, **named: Any) -> Any:
        return await self.inner.create(*args, **named)


async def test_the_marks_of_a_crowd_are_made_side_by_side_each_once(bus: Any) -> None:
    """The mark of one client that leaves does not wait for those of all who left before it."""
    slow = Slow(bus)
    requests = [
        msgspec.structs.replace(REQUEST, request_id=RequestId(f"{n:032x}")) for n in range(100)
    ]
    async with writer(slow) as records:
        for request in requests:
            records.cancel(request, "left")
            records.cancel(request, "left again")
        async with asyncio.timeout(60):
            while slow.waiting < 16:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert slow.waiting < 100
        slow.through.set()
        assert await records.settled(60)
    assert slow.waiting == 100
    values = bus._broker.bucket(REQUEST_RECORDS).values
    assert {request.request_id for request in requests} <= values.keys()

"""A scheduler on the memory bus, with no workers: what it does with what it pulls."""

import asyncio
import dataclasses

from diptych_bus.memory import MemoryBroker
from diptych_bus.port import Pulled
from diptych_contracts import subjects
from diptych_contracts.dead import Cause, DeadEntry, DeadLetter, DeadRequest
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason, Fence
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import (
    DEAD,
    GATEWAY_HEADER,
    REQUEST_RECORDS,
    REQUESTS,
    SCHEDULERS,
    SECRET_HEADER,
    UNDELIVERED,
)
from diptych_contracts.wire import encode
from diptych_testkit.builders import GATEWAY, MODEL, REQUEST, a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet


async def recorded(fleet: SmallFleet, request_id: str = REQUEST) -> RequestRecord:
    records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    async with asyncio.timeout(60):
        while (kept := await records.get(request_id)) is None:
            await asyncio.sleep(0.01)
    return kept.value


async def erased(fleet: SmallFleet, seq: int) -> None:
    """Wait until nothing stands at `seq`."""
    async with asyncio.timeout(60):
        while await fleet.bus.stored(REQUESTS.name, seq) is not None:
            await asyncio.sleep(0.01)


async def test_a_request_gets_one_record_whoever_pulls_it() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler("s1", drain_s=0.1)
        fleet.scheduler("s2", drain_s=0.1)
        await fleet.ready()
        for number in range(8):
            await fleet.client.send(a_request(f"r{number}"))
        owners = {(await recorded(fleet, f"r{number}")).owner for number in range(8)}
        assert owners <= {fleet.incarnation("s1"), fleet.incarnation("s2")}


async def all_dead(fleet: SmallFleet) -> list[DeadEntry]:
    found = fleet.bus.all_stored(DEAD.name, subject=subjects.DEADS)
    return [item.delivery.decode(DeadEntry) async for item in found]


async def the_dead(fleet: SmallFleet) -> DeadEntry:
    async with asyncio.timeout(60):
        while not (entries := await all_dead(fleet)):
            await asyncio.sleep(0.01)
    (entry,) = entries
    return entry


SECRET = bytes(range(16))
CANCELLED = RequestRecord(
    request_id=REQUEST,
    owner=GATEWAY,
    gateway=GATEWAY,
    state=RecordState.CANCELLING,
    cancel_reason="not accepted in time",
)
NONSENSE = Fence(request_id=REQUEST, attempt=1)
SUBJECT = subjects.request("interactive", MODEL)


async def test_what_is_no_request_is_buried_with_the_reason() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await fleet.ready()
        await fleet.bus.store(SUBJECT, NONSENSE, msg_id="x", timeout_s=60)
        letter = await the_dead(fleet)
        assert isinstance(letter, DeadLetter)
        assert (letter.subject, letter.payload) == (SUBJECT, encode(NONSENSE))
        assert (letter.request_id, letter.gateway) == ("x", "")
        assert "expected" in letter.reason
        assert letter.died_unix_ms > 0
        await erased(fleet, 1)


async def test_whoever_sent_what_is_no_request_is_told() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler("s1")
        fleet.scheduler("s2")
        await fleet.ready()
        fleet.client.expect(REQUEST, SECRET)
        headers = {GATEWAY_HEADER: GATEWAY, SECRET_HEADER: SECRET.hex()}
        await fleet.bus.store(SUBJECT, NONSENSE, msg_id=REQUEST, timeout_s=60, headers=headers)
        end = await fleet.client.ended(REQUEST)
        assert (end.reason, end.cause) == (EndReason.FAILED, Cause.UNREADABLE)
        assert "cannot read the stored request: expected a Request" in end.detail
        record = await fleet.closed(REQUEST)
        assert record.end == end
        assert await fleet.bus.stored(REQUESTS.name, record.request_seq) is None
        letters = [e for e in await all_dead(fleet) if isinstance(e, DeadLetter)]
        assert [(letter.request_id, letter.gateway) for letter in letters] == [(REQUEST, GATEWAY)]


async def test_a_dead_owners_request_that_cannot_be_read_is_closed() -> None:
    """Its bytes once ended every scheduler that adopted it, one after another."""
    async with small_fleet() as fleet:
        done = await fleet.bus.store(SUBJECT, NONSENSE, msg_id="x", timeout_s=60)
        orphan = RequestRecord(
            request_id=REQUEST,
            owner=Incarnation("scheduler-gone"),
            gateway=GATEWAY,
            state=RecordState.QUEUED,
            request_seq=done.seq,
            deadline_unix_ms=2**53,
        )
        await fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).create(REQUEST, orphan)
        fleet.client.expect(REQUEST)
        fleet.scheduler()
        end = await fleet.client.ended(REQUEST)
        assert (end.reason, end.cause) == (EndReason.FAILED, Cause.MISSING)
        assert (await fleet.closed(REQUEST)).end == end


class Oblivious:
    """Pulls requests and does nothing with them, like a scheduler that dies each time."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def take(self, pulled: Pulled) -> None:
        self.seen.append(pulled.num_delivered)


async def handed_out(fleet: SmallFleet, times: int) -> None:
    """Have the request in `REQUESTS` pulled so often, for nothing."""
    bus, taker = fleet.broker.connect("oblivious"), Oblivious()
    quick = dataclasses.replace(SCHEDULERS, ack_wait_s=0.05)
    await bus.pull(quick, taker.take, paused=lambda: len(taker.seen) >= times)
    await fleet.client.send(a_request())
    async with asyncio.timeout(60):
        while len(taker.seen) < times:
            await asyncio.sleep(0.01)
    await bus.kill()
    assert taker.seen == list(range(1, times + 1))


async def is_given_up(fleet: SmallFleet) -> None:
    end = await fleet.client.ended(REQUEST)
    assert (end.reason, end.cause) == (EndReason.FAILED, Cause.UNDELIVERABLE)
    assert end.detail == "it was handed out 5 times and never taken on"
    assert (await fleet.closed(REQUEST)).end == end
    dead = await the_dead(fleet)
    assert isinstance(dead, DeadRequest)
    assert (dead.request_id, dead.cause) == (REQUEST, Cause.UNDELIVERABLE)
    assert dead.request is not None
    assert dead.request.prompt_ids == a_request().prompt_ids


async def test_the_last_delivery_gets_a_record_and_an_end() -> None:
    async with small_fleet() as fleet:
        await handed_out(fleet, SCHEDULERS.max_deliver - 1)
        fleet.scheduler()
        await is_given_up(fleet)


async def test_what_is_delivered_no_more_gets_a_record_and_an_end() -> None:
    """A scheduler that dies on the last delivery leaves nobody who would know."""
    async with small_fleet() as fleet:
        await handed_out(fleet, SCHEDULERS.max_deliver)
        async with asyncio.timeout(60):
            while await fleet.bus.stored(UNDELIVERED.name, 1) is None:
                await asyncio.sleep(0.01)
        fleet.scheduler("s1")
        fleet.scheduler("s2")
        await is_given_up(fleet)


async def test_a_request_whose_ack_was_forgotten_is_not_given_up() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler(drain_s=0.1)
        await fleet.ready()
        await fleet.client.send(a_request())
        record = await recorded(fleet)
        consumer = fleet.broker.consumer(SCHEDULERS)
        for deliveries in range(2, 7):
            consumer._deliveries[record.request_seq] = deliveries - 1
            consumer._requeue(record.request_seq)
            await asyncio.sleep(0.05)
        assert (await recorded(fleet)).state is RecordState.QUEUED
        assert await all_dead(fleet) == []


async def test_a_request_that_was_cancelled_before_it_came_is_not_run() -> None:
    async with small_fleet(MemoryBroker()) as fleet:
        records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        await records.create(REQUEST, CANCELLED)
        fleet.scheduler()
        await fleet.ready()
        await fleet.client.send(a_request())
        end = await fleet.client.ended(REQUEST)
        assert (end.reason, end.detail) == (EndReason.CANCELLED, "not accepted in time")
        assert (await fleet.closed(REQUEST)).owner == fleet.incarnation("s1")


async def stored_again(fleet: SmallFleet) -> int:
    """As after a restart of the server, which then knows no ids of what was erased."""
    done = await fleet.bus.store(SUBJECT, a_request(), msg_id="again", timeout_s=60)
    return done.seq


async def test_a_request_that_comes_again_after_its_end_is_erased() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await fleet.ready()
        fleet.client.expect(REQUEST)
        await fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).create(REQUEST, CANCELLED)
        await fleet.client.send(a_request())
        await fleet.closed(REQUEST)
        await erased(fleet, await stored_again(fleet))
        assert (await fleet.closed(REQUEST)).request_seq == 1


async def test_a_request_that_was_stored_twice_is_erased_once_it_is_known() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler("s1", drain_s=0.1)
        fleet.scheduler("s2", drain_s=0.1)
        await fleet.ready()
        await fleet.client.send(a_request())
        for copy in range(4):  # to both schedulers
            await fleet.bus.store(SUBJECT, a_request(), msg_id=f"{copy}", timeout_s=60)
        seqs = set(range(1, 6)) - {(await recorded(fleet)).request_seq}
        for seq in seqs:
            await erased(fleet, seq)
        record = await recorded(fleet)
        assert record.state is RecordState.QUEUED
        assert await fleet.bus.stored(REQUESTS.name, record.request_seq) is not None


async def test_what_cannot_be_read_and_was_cancelled_is_closed() -> None:
    async with small_fleet() as fleet:
        await fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).create(REQUEST, CANCELLED)
        fleet.client.expect(REQUEST, SECRET)
        headers = {GATEWAY_HEADER: GATEWAY, SECRET_HEADER: SECRET.hex()}
        await fleet.bus.store(SUBJECT, NONSENSE, msg_id=REQUEST, timeout_s=60, headers=headers)
        fleet.scheduler()
        record = await fleet.closed(REQUEST)
        assert record.end is not None
        assert record.end.cause == Cause.UNREADABLE
        assert await fleet.bus.stored(REQUESTS.name, 1) is None

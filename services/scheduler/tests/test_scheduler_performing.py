"""Orders performed on the memory bus, with the gateway writing into the same record."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from diptych_bus.memory import MemoryBroker
from diptych_bus.port import Bucket, Bus, Delivery, Gone, Kept
from diptych_contracts import subjects
from diptych_contracts.events import RequestEnded
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import EVENTS, REQUEST_RECORDS, REQUESTS
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import (
    AdoptionLost,
    AdoptRecord,
    Announce,
    CreateRecord,
    Effect,
    EraseRequest,
    Event,
    RecordSeen,
    SaveRecord,
)
from diptych_policy.recovery import Ledger
from diptych_scheduler.journals import Journals
from diptych_scheduler.performing import Performer
from diptych_scheduler.recording import Records
from diptych_testkit.builders import GATEWAY, MODEL, REQUEST, a_request, an_end

ME = Incarnation("s1-1")
END = an_end(EndReason.LENGTH)


def record(state: RecordState) -> RequestRecord:
    end = END if state is RecordState.CLOSED else None
    return RequestRecord(
        request_id=REQUEST, owner=ME, gateway=GATEWAY, state=state, request_seq=1, end=end
    )


class Desk:
    """A performer, and everything it tells."""

    me = ME
    judged_s = 0.0

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup) -> None:
        self.bus = bus
        self.told: list[Event] = []
        journals = Journals(bus, Ledger(ME, Fleet()), self.tell)
        self.written = Records(self, bus, journals, resume_window_s=900.0)
        self.performer = Performer(self, bus, self.written, tasks, job_answer_s=5.0)

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def alive(self, _member: Incarnation) -> bool:
        return True

    def current(self, _request_id: RequestId, _attempt: int) -> bool:
        return True

    @property
    def records(self) -> Bucket[RequestRecord]:
        return self.bus.bucket(REQUEST_RECORDS, RequestRecord)

    @property
    def remembered(self) -> int:
        """Requests that it still knows something of."""
        return len(self.written)

    async def perform(self, *effects: Effect) -> None:
        self.performer.order(list(effects))
        await self.performer.settle(timeout_s=5)

    def watched(self, change: Kept[RequestRecord] | Gone) -> None:
        if isinstance(change, Kept) and self.written.is_news(change):
            self.tell(RecordSeen(change.value, change.revision))


@asynccontextmanager
async def a_desk() -> AsyncIterator[Desk]:
    async with asyncio.TaskGroup() as tasks:
        bus = MemoryBroker().connect("s1")
        desk = Desk(bus, tasks)
        subject = subjects.request("interactive", MODEL)
        await bus.store(subject, a_request(), msg_id=REQUEST, timeout_s=60)
        yield desk
        await bus.close()


def closing() -> tuple[Effect, ...]:
    ended = RequestEnded(request_id=REQUEST, end=END)
    return (
        Announce(REQUEST, ended, f"{REQUEST}.end", first=True),
        EraseRequest(REQUEST, 1),
        SaveRecord(record(RecordState.CLOSED)),
    )


async def test_a_client_that_leaves_as_its_answer_ends_leaves_no_open_record() -> None:
    """Two in 6,000 soaked requests stayed `cancelling` for ever: the mark won the swap."""
    async with a_desk() as desk:
        await desk.perform(CreateRecord(record(RecordState.QUEUED)))
        kept = await desk.records.get(REQUEST)
        assert kept is not None
        mark = msgspec.structs.replace(kept.value, state=RecordState.CANCELLING)
        await desk.records.update(REQUEST, mark, kept.revision)  # by the gateway
        await desk.perform(*closing())
        kept = await desk.records.get(REQUEST)
        assert kept is not None
        assert kept.value == record(RecordState.CLOSED)
        assert await desk.bus.stored(REQUESTS.name, 1) is None
        assert await desk.bus.stored(EVENTS.name, 1) is not None


async def test_work_that_was_given_up_meanwhile_is_not_saved() -> None:
    async with a_desk() as desk:
        await desk.perform(CreateRecord(record(RecordState.QUEUED)))
        mark = record(RecordState.CANCELLING)
        revision = await desk.records.put(REQUEST, mark)
        await desk.perform(SaveRecord(record(RecordState.ROUTED)), EraseRequest(REQUEST, 1))
        assert desk.told[-1] == RecordSeen(mark, revision)
        assert await desk.bus.stored(REQUESTS.name, 1) is not None, "its orders are dropped"


async def test_nothing_is_remembered_of_a_closed_request_whichever_word_comes_first() -> None:
    """The watch may tell of a write before its own acknowledgement does."""
    async with a_desk() as desk:
        watching = await desk.records.watch(desk.watched)
        await desk.perform(CreateRecord(record(RecordState.QUEUED)), *closing())
        await watching.close()
        assert desk.remembered == 0
        closed = await desk.records.get(REQUEST)
        assert closed is not None
        for _ in range(2):  # told again, as after a reconnect
            desk.watched(closed)
        assert desk.remembered == 0


async def test_nothing_is_remembered_of_a_request_that_comes_again_after_its_end() -> None:
    async with a_desk() as desk:
        revision = await desk.records.put(REQUEST, record(RecordState.CLOSED))
        await desk.perform(CreateRecord(record(RecordState.QUEUED)))
        assert desk.told[-1] == RecordSeen(record(RecordState.CLOSED), revision)
        assert desk.remembered == 0


async def test_what_was_decided_before_another_owner_was_known_loses_its_swap() -> None:
    """A scheduler that slept once overwrote its adopter: it took over the revision it had seen."""
    async with a_desk() as desk:
        await desk.perform(CreateRecord(record(RecordState.QUEUED)))
        adopted = msgspec.structs.replace(record(RecordState.QUEUED), owner=Incarnation("s2-1"))
        revision = await desk.records.put(REQUEST, adopted)
        desk.watched(Kept(REQUEST, adopted, revision))
        await desk.perform(SaveRecord(record(RecordState.ROUTED)))
        kept = await desk.records.get(REQUEST)
        assert kept is not None
        assert kept.value == adopted
        assert desk.told[-1] == RecordSeen(adopted, revision)


async def test_an_adoption_names_the_revision_it_was_decided_on() -> None:
    async with a_desk() as desk:
        theirs = msgspec.structs.replace(record(RecordState.QUEUED), owner=Incarnation("s2-1"))
        seen = await desk.records.put(REQUEST, theirs)
        moved = msgspec.structs.replace(theirs, attempt=2)
        revision = await desk.records.put(REQUEST, moved)
        desk.watched(Kept(REQUEST, moved, revision))
        await desk.perform(AdoptRecord(record(RecordState.QUEUED), seen))
        assert desk.told[-1] == AdoptionLost(moved, revision)
        kept = await desk.records.get(REQUEST)
        assert kept is not None
        assert kept.value == moved
        assert desk.remembered <= 1


class Handed:
    """A pulled message, and whether it was acknowledged."""

    def __init__(self, bus: Bus) -> None:
        self.delivery = Delivery("request.x.y", b"")
        self.seq, self.num_delivered, self.stored_unix_ms = 1, 1, bus.unix_ms()
        self.acked = False

    async def ack(self) -> None:
        self.acked = True

    async def hold(self) -> None: ...

    async def nak(self, delay_s: float) -> None: ...


async def test_a_mark_is_owned_before_its_request_is_acknowledged() -> None:
    """Its scheduler once died in between: nobody adopted the mark, and the request stayed."""
    mark = msgspec.structs.replace(
        record(RecordState.CANCELLING), owner=GATEWAY, request_seq=0, cancel_reason="left"
    )
    async with a_desk() as desk:
        await desk.records.create(REQUEST, mark)
        handed = Handed(desk.bus)
        desk.written.expect(REQUEST, handed)
        await desk.perform(CreateRecord(record(RecordState.QUEUED)))
        assert handed.acked
        kept = await desk.records.get(REQUEST)
        assert kept is not None
        assert (kept.value.owner, kept.value.request_seq) == (ME, 1)
        assert (kept.value.state, kept.value.cancel_reason) == (RecordState.CANCELLING, "left")
        assert desk.told == [RecordSeen(kept.value, kept.revision)]

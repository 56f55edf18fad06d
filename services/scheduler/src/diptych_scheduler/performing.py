"""Performing the ledger's orders: in order for each request, side by side for different ones."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, assert_never

from opentelemetry.context import Context

from diptych_bus.port import Bus, Delivery, Kept, Pulled
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway, Conflict, Permanent, StoreFull, Transient
from diptych_contracts.events import LifeCycleEvent
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import CancelDone, JobAnswer
from diptych_contracts.journal import JournalEntry
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.streams import PROMPTS, REQUEST_RECORDS, REQUESTS
from diptych_policy.lifecycle import (
    AdoptionLost,
    AdoptRecord,
    Announce,
    Bury,
    CancelUnheard,
    CancelWork,
    CreateRecord,
    Effect,
    EraseRequest,
    Event,
    JobAnswered,
    PublishEnd,
    PublishFence,
    RecordAdopted,
    RecordCreated,
    RecordSeen,
    SaveRecord,
    SendJob,
)
from diptych_policy.merging import overrules
from diptych_scheduler.burying import bury_request
from diptych_scheduler.journals import Journals
from diptych_scheduler.settings import SchedulerSettings
from diptych_telemetry import logger, names, tracer

log = logger("scheduler")
spans = tracer("scheduler")

_PAUSE_S = 0.1
_CALL_S = 1.0
_ANNOUNCE_TRIES = 20

T = TypeVar("T")


class Owner(Protocol):
    """What the performer needs of the scheduler."""

    @property
    def me(self) -> Incarnation: ...

    @property
    def judged_s(self) -> float:
        """The judge's clock: it stands still while the bus carries nothing."""
        ...

    def tell(self, event: Event) -> None: ...

    def alive(self, member: Incarnation) -> bool: ...

    def current(self, request_id: RequestId, attempt: int) -> bool: ...


def request_of(effect: Effect) -> RequestId:
    """Which request an effect is about."""
    match effect:
        case CreateRecord(record) | SaveRecord(record) | AdoptRecord(record=record):
            return record.request_id
        case CancelWork(cancel=cancel):
            return cancel.request_id
        case PublishFence(fence=fence):
            return fence.request_id
        case PublishEnd(end=end):
            return end.request_id
        case SendJob() | Bury() | EraseRequest() | Announce():
            return effect.request_id
        case _:
            assert_never(effect)


class Performer:
    """A queue of effects per request, each drained by one task while it is not empty."""

    def __init__(
        self,
        owner: Owner,
        bus: Bus,
        journals: Journals,
        tasks: asyncio.TaskGroup,
        settings: SchedulerSettings,
    ) -> None:
        self._owner = owner
        self._bus = bus
        self._journals = journals
        self._tasks = tasks
        self._job_answer_s = settings.job_answer_s
        self._resume_window_s = settings.resume_window_s
        self._records = bus.bucket(REQUEST_RECORDS, RequestRecord)
        self._revisions: dict[RequestId, int] = {}
        self._queues: dict[RequestId, deque[Effect]] = {}
        self._expected: dict[RequestId, Pulled] = {}
        self._contexts: dict[RequestId, Context | None] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._abandoned = False
        self.storage_full = False
        """Whether the bucket of records takes none."""

    # In

    def expect(self, request_id: RequestId, pulled: Pulled) -> None:
        """`pulled` is acknowledged once the request's record exists."""
        self._expected[request_id] = pulled
        self._contexts[request_id] = pulled.delivery.context

    def expected(self) -> list[Pulled]:
        """Messages whose record does not exist yet."""
        return list(self._expected.values())

    def is_news(self, kept: Kept[RequestRecord]) -> bool:
        """Whether a watched record was written by someone else (or before this life).

        The revision of another's record is not taken over: what is still to be written here was
        decided before that one was known, and must lose its swap.
        """
        request_id = kept.value.request_id
        news = kept.revision > self._revisions.get(request_id, 0)
        if news and kept.value.owner == self._owner.me:
            self._revisions[request_id] = kept.revision
        elif news:
            self._revisions.pop(request_id, None)
        self._settled(kept.value)
        return news

    def gone(self, request_id: RequestId) -> None:
        """A record was deleted or has expired."""
        self._revisions.pop(request_id, None)
        self._contexts.pop(request_id, None)

    def order(self, effects: list[Effect]) -> None:
        """Perform `effects`, after what was ordered before for the same requests."""
        for effect in () if self._abandoned else effects:
            request_id = request_of(effect)
            if request_id in self._queues:
                self._queues[request_id].append(effect)
            else:
                self._queues[request_id] = deque([effect])
                self._spawn(self._drain(request_id))

    def _spawn(self, work: Any) -> None:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def settle(self, timeout_s: float) -> None:
        """Wait until what was ordered is done, `timeout_s` at most."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def abandon(self) -> None:
        """Drop what is not done, and what is still ordered: another replica adopts it."""
        self._abandoned = True
        for task in self._running:
            task.cancel()

    async def _drain(self, request_id: RequestId) -> None:
        queue = self._queues[request_id]
        while queue:
            seen = await self._perform(queue[0])
            if seen is not None:
                queue.clear()
                self._settled(seen.value)
                self._owner.tell(RecordSeen(seen.value, seen.revision))
            else:
                queue.popleft()
        del self._queues[request_id]

    async def _perform(self, effect: Effect) -> Kept[RequestRecord] | None:
        """Do it; gives the record that stands there if a swap was lost."""
        match effect:
            case CreateRecord(record):
                return await self._create(record)
            case SaveRecord(record):
                return await self._save(record)
            case AdoptRecord():
                await self._adopt(effect)
            case SendJob():
                self._spawn(self._send_job(effect))
            case CancelWork():
                self._spawn(self._cancel_work(effect))
            case _:
                await self._publish(effect)
        return None

    async def _publish(
        self, effect: PublishFence | PublishEnd | Bury | EraseRequest | Announce
    ) -> None:
        match effect:
            case PublishFence(gateway, entry) | PublishEnd(gateway, entry):
                await self._journal(gateway, entry)
            case Bury(request_id, dead):
                context = self._contexts.get(request_id)
                await _until_back(lambda: bury_request(self._bus, dead, context))
            case EraseRequest():
                await self._erase(effect)
            case Announce(first=True):
                await self._announce(effect.event, effect.msg_id)
            case Announce():
                self.announce(effect.event, effect.msg_id)
            case _:
                assert_never(effect)

    # Records

    async def _create(self, record: RequestRecord) -> Kept[RequestRecord] | None:
        seen = await self._swap(record, lambda: self._records.create(record.request_id, record))
        pulled = self._expected.pop(record.request_id, None)
        if pulled is not None:
            await _until_back(pulled.ack)
        if seen is None:
            self._owner.tell(RecordCreated(record.request_id))
        return seen

    async def _save(self, record: RequestRecord) -> Kept[RequestRecord] | None:
        """Write over what was last known here; an end also over a gateway's mark."""
        while True:
            revision = self._revisions.get(record.request_id, 0)
            seen = await self._update(record, revision)
            if seen is None or not overrules(record, seen.value):
                break
        self._settled(seen.value if seen else record)
        return seen

    async def _update(self, record: RequestRecord, revision: int) -> Kept[RequestRecord] | None:
        closed = record.state is RecordState.CLOSED
        ttl_s = self._resume_window_s if closed else None
        return await self._swap(
            record,
            lambda: self._records.update(record.request_id, record, revision, ttl_s=ttl_s),
        )

    def _settled(self, record: RequestRecord) -> None:
        """Remember nothing of a closed request; the watch may have told of it before."""
        if record.state is RecordState.CLOSED:
            self._revisions.pop(record.request_id, None)
            self._contexts.pop(record.request_id, None)

    async def _swap(
        self, record: RequestRecord, write: Callable[[], Awaitable[int]]
    ) -> Kept[RequestRecord] | None:
        """Write; gives what stands there if that was lost to another."""
        request_id = record.request_id
        try:
            revision = await self._until_written(write)
        except Conflict:
            kept = await _until_back(lambda: self._records.get(request_id))
            if kept is None:
                return None
            self._revisions[request_id] = kept.revision
            return None if kept.value == record else kept
        self._revisions[request_id] = max(revision, self._revisions.get(request_id, 0))
        return None

    async def _until_written(self, write: Callable[[], Awaitable[int]]) -> int:
        while True:
            try:
                revision = await write()
            except Transient as err:
                self.storage_full = isinstance(err, StoreFull)
                await asyncio.sleep(_PAUSE_S)
            else:
                self.storage_full = False
                return revision

    async def _adopt(self, effect: AdoptRecord) -> None:
        record = effect.record
        seen = await self._update(record, effect.revision)
        if seen is not None:
            self._settled(seen.value)
            self._owner.tell(AdoptionLost(seen.value, seen.revision))
            return
        log.info("request_adopted", request_id=record.request_id, attempt=record.attempt)
        stored = await _until_back(lambda: self._bus.stored(REQUESTS.name, record.request_seq))
        request = _request_in(stored)
        self._contexts[record.request_id] = stored.context if stored else None
        told = await _until_back(lambda: self._journals.history(record))
        self._owner.tell(RecordAdopted(record, request, told.parts, told.until_seq, told.whole))

    # Workers

    async def _send_job(self, effect: SendJob) -> None:
        request_id, attempt, worker = effect.request_id, effect.attempt, effect.worker
        give_up_s = self._owner.judged_s + self._job_answer_s
        answer: JobAnswer | None = None
        context = self._contexts.get(request_id)
        with spans.start_as_current_span(names.SCHEDULER_ROUTE, context=context) as span:
            span.set_attribute(names.ATTEMPT, attempt)
            span.set_attribute(names.MESSAGING_DESTINATION, "job.<worker>")
            while answer is None and self._owner.judged_s < give_up_s:
                if not self._owner.current(request_id, attempt):
                    return
                try:
                    answer = await self._bus.request(
                        subjects.job(worker), effect.job, JobAnswer, timeout_s=0.5
                    )
                except BusAway:
                    await asyncio.sleep(_PAUSE_S)
        self._owner.tell(JobAnswered(request_id, attempt, worker, answer))

    async def _cancel_work(self, effect: CancelWork) -> None:
        """Ask until it is acknowledged; the ledger asks again when a lost worker beats again."""
        while self._owner.alive(effect.worker):
            try:
                await self._bus.request(
                    subjects.cancel(effect.worker), effect.cancel, CancelDone, timeout_s=_CALL_S
                )
            except BusAway:
                await asyncio.sleep(_PAUSE_S)
            else:
                return
        self._owner.tell(CancelUnheard(effect.worker, effect.cancel))

    # Streams

    async def _erase(self, effect: EraseRequest) -> None:
        await _until_back(lambda: self._bus.erase(REQUESTS.name, effect.request_seq))
        if effect.prompt:
            await _until_back(lambda: self._bus.delete_object(PROMPTS, effect.prompt))

    async def _journal(self, gateway: Incarnation, entry: JournalEntry) -> None:
        await _until_back(lambda: self._bus.record(gateway, entry, timeout_s=_CALL_S))

    def announce(self, event: LifeCycleEvent, msg_id: str) -> None:
        """Publish an event; nothing waits for it, and replicas may publish the same one."""
        if not self._abandoned:
            self._spawn(self._announce(event, msg_id))

    async def _announce(self, event: LifeCycleEvent, msg_id: str) -> None:
        name = str(type(event).__struct_config__.tag)
        subject = subjects.event(name.partition(".")[0])
        for _ in range(_ANNOUNCE_TRIES):
            try:
                await self._bus.store(subject, event, msg_id=msg_id, timeout_s=_CALL_S)
            except Transient:
                await asyncio.sleep(_PAUSE_S)
            else:
                return
        log.warning("event_not_stored", subject=subject, msg_id=msg_id)


def _request_in(stored: Delivery | None) -> Request | None:
    """What stream `REQUESTS` holds, if it is a request."""
    try:
        request: Request | None = stored.decode(Request) if stored else None
    except Permanent as err:
        log.error("request_unreadable", error=str(err))
        return None
    return request


async def _until_back(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat `call` while the bus is away: every call here may be made twice."""
    while True:
        try:
            return await call()
        except Transient:
            await asyncio.sleep(_PAUSE_S)

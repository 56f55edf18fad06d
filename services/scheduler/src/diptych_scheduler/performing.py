"""Performing the ledger's orders: in order for each request, side by side for different ones."""

import asyncio
from collections import deque
from typing import Any, Protocol, assert_never

from diptych_bus.port import Bus, Kept
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway, Transient
from diptych_contracts.events import LifeCycleEvent
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import CancelDone, JobAnswer
from diptych_contracts.journal import JournalEntry
from diptych_contracts.requests import RequestRecord
from diptych_contracts.streams import PROMPTS, REQUESTS
from diptych_policy.lifecycle import (
    AdoptRecord,
    Announce,
    Bury,
    CancelUnheard,
    CancelWork,
    CreateRecord,
    Denounce,
    Effect,
    EraseRequest,
    Event,
    JobAnswered,
    PublishEnd,
    PublishFence,
    RecordSeen,
    SaveRecord,
    SendJob,
)
from diptych_policy.paths import path_of
from diptych_scheduler.burying import bury_request
from diptych_scheduler.outlasting import PAUSE_S, until_back
from diptych_scheduler.recording import Records
from diptych_telemetry import logger, names, tracer

log = logger("scheduler")
spans = tracer("scheduler")

_CALL_S = 1.0
_ANNOUNCE_TRIES = 20


class Owner(Protocol):
    """What the performer needs of the scheduler."""

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
        case SendJob() | Bury() | EraseRequest() | Announce() | Denounce():
            return effect.request_id
        case _:
            assert_never(effect)


class Performer:
    """A queue of effects per request, each drained by one task while it is not empty.

    Args:
        owner: Told what came of them.
        bus: To workers and streams.
        records: What writes the requests' records.
        tasks: Where the work runs.
        job_answer_s: How long a live worker may take to answer a job.
    """

    def __init__(
        self,
        owner: Owner,
        bus: Bus,
        records: Records,
        tasks: asyncio.TaskGroup,
        *,
        job_answer_s: float,
    ) -> None:
        self._owner = owner
        self._bus = bus
        self._records = records
        self._tasks = tasks
        self._job_answer_s = job_answer_s
        self._queues: dict[RequestId, deque[Effect]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._abandoned = False

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
                self._records.settled(seen.value)
                self._owner.tell(RecordSeen(seen.value, seen.revision))
            else:
                queue.popleft()
        del self._queues[request_id]

    async def _perform(self, effect: Effect) -> Kept[RequestRecord] | None:
        """Do it; gives the record that stands there if a swap was lost."""
        match effect:
            case CreateRecord(record):
                return await self._records.create(record)
            case SaveRecord(record):
                return await self._records.save(record)
            case AdoptRecord():
                await self._records.adopt(effect)
            case SendJob():
                self._spawn(self._send_job(effect))
            case CancelWork():
                self._spawn(self._cancel_work(effect))
            case Denounce(request_id, said, attempt):
                log.warning("forged_entry", request_id=request_id, said=said, attempt=attempt)
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
                context = self._records.context(request_id)
                await until_back(lambda: bury_request(self._bus, dead, context))
            case EraseRequest():
                await self._erase(effect)
            case Announce(first=True):
                await self._announce(effect.event, effect.msg_id)
            case Announce():
                self.announce(effect.event, effect.msg_id)
            case _:
                assert_never(effect)

    # Workers

    async def _send_job(self, effect: SendJob) -> None:
        request_id, attempt, worker = effect.request_id, effect.attempt, effect.worker
        give_up_s = self._owner.judged_s + self._job_answer_s
        answer: JobAnswer | None = None
        context = self._records.context(request_id)
        with spans.start_as_current_span(names.SCHEDULER_ROUTE, context=context) as span:
            span.set_attribute(names.ATTEMPT, attempt)
            span.set_attribute(names.KV_PATH, path_of(effect.job))
            span.set_attribute(names.MESSAGING_DESTINATION, "job.<worker>")
            while answer is None and self._owner.judged_s < give_up_s:
                if not self._owner.current(request_id, attempt):
                    return
                try:
                    answer = await self._bus.request(
                        subjects.job(worker), effect.job, JobAnswer, timeout_s=0.5
                    )
                except BusAway:
                    await asyncio.sleep(PAUSE_S)
        self._owner.tell(JobAnswered(request_id, attempt, worker, answer))

    async def _cancel_work(self, effect: CancelWork) -> None:
        """Ask until it is acknowledged; the ledger asks again when a lost worker beats again."""
        while self._owner.alive(effect.worker):
            try:
                await self._bus.request(
                    subjects.cancel(effect.worker), effect.cancel, CancelDone, timeout_s=_CALL_S
                )
            except BusAway:
                await asyncio.sleep(PAUSE_S)
            else:
                return
        self._owner.tell(CancelUnheard(effect.worker, effect.cancel))

    # Streams

    async def _erase(self, effect: EraseRequest) -> None:
        await until_back(lambda: self._bus.erase(REQUESTS.name, effect.request_seq))
        if effect.prompt:
            await until_back(lambda: self._bus.delete_object(PROMPTS, effect.prompt))

    async def _journal(self, gateway: Incarnation, entry: JournalEntry) -> None:
        await until_back(lambda: self._bus.record(gateway, entry, timeout_s=_CALL_S))

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
                await asyncio.sleep(PAUSE_S)
            else:
                return
        log.warning("event_not_stored", subject=subject, msg_id=msg_id)

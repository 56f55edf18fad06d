"""The shell: what arrives becomes events, what the ledger orders is performed."""

import asyncio
from collections.abc import Iterable

from diptych_bus.port import Delivery, Gone, Kept, Subscription
from diptych_chassis.draining import Drain
from diptych_chassis.repeating import every
from diptych_chassis.running import Member
from diptych_contracts import subjects
from diptych_contracts.events import MemberJoined, MemberLost
from diptych_contracts.fleet import Beat, QueueLoad, WorkerLoad, WorkerRegistration
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.responses import Attended
from diptych_contracts.streams import (
    REQUEST_RECORDS,
    SCHEDULERS,
    UNDELIVERED_SCHEDULERS,
    WORKERS,
)
from diptych_policy.fleet import Fleet
from diptych_policy.leaving import may_leave
from diptych_policy.lifecycle import (
    AnswersAttended,
    Event,
    MemberWasFound,
    MemberWasLost,
    RecordGone,
    RecordSeen,
    Ticked,
)
from diptych_policy.liveness import Liveness
from diptych_policy.recovery import Ledger
from diptych_policy.routing import strangers
from diptych_scheduler.cached_blocks import CachedBlocks
from diptych_scheduler.intake import Intake
from diptych_scheduler.journals import Journals
from diptych_scheduler.metering import Metering
from diptych_scheduler.overtaking import AttemptDesk
from diptych_scheduler.performing import Performer
from diptych_scheduler.recording import Records
from diptych_scheduler.settings import SchedulerSettings
from diptych_scheduler.sweeping import PromptSweep
from diptych_telemetry import logger

log = logger("scheduler")

SERVICE = "scheduler"
_HOLD_S = 0.5
"""A quarter of the ack wait."""
_QUEUE_S = 0.25
"""How often gateways hear how long the queue is."""


def never() -> bool:
    """What is pulled here ends at once: it needs no place in the queue."""
    return False


class Scheduler:
    """One replica."""

    def __init__(
        self,
        member: Member,
        *,
        fleet: Fleet,
        ledger: Ledger,
        liveness: Liveness,
        settings: SchedulerSettings,
    ) -> None:
        self._member = member
        self._bus = member.bus
        self._fleet = fleet
        self._ledger = ledger
        self._liveness = liveness
        self._settings = settings
        self._metering = Metering()
        self._journals = Journals(member.bus, ledger, self.tell)
        self._records = Records(
            self, member.bus, self._journals, resume_window_s=settings.resume_window_s
        )
        self._replicas: set[Incarnation] = set()
        """Other schedulers that serve: they adopt what this one leaves behind."""

    async def run(self) -> None:
        """Serve until told to stop; then finish what is live, or hand it over."""
        async with asyncio.TaskGroup() as tasks:
            self._performer = Performer(
                self,
                self._bus,
                self._records,
                tasks,
                job_answer_s=self._settings.job_answer_s,
            )
            self._cached = CachedBlocks(
                self._bus, self._fleet.blocks, tasks, self._member.incarnation
            )
            intake = Intake(
                self._bus,
                self._journals,
                records=self._records,
                tell=self.tell,
                recorded=self._ledger.recorded,
                seq_of=self._ledger.seq_of,
            )
            try:
                await self._listen()
                pulling = [
                    await self._bus.pull(SCHEDULERS, intake.take, paused=lambda: self._ledger.full),
                    await self._bus.pull(
                        UNDELIVERED_SCHEDULERS, intake.take_undelivered, paused=never
                    ),
                ]
                sweep = PromptSweep(self._bus)
                working = [
                    tasks.create_task(intake.run()),
                    tasks.create_task(every(_HOLD_S, intake.hold)),
                    tasks.create_task(self._tick()),
                    tasks.create_task(every(self._settings.sweep_s, sweep.look)),
                    tasks.create_task(every(_QUEUE_S, self._report_queue)),
                ]
                self._member.ready(True)
                await self._member.stopping.wait()
                await self._drain(pulling)
                for task in working:
                    task.cancel()
            finally:
                self._cached.stop()
                self._performer.abandon()

    async def _drain(self, pulling: Iterable[Subscription]) -> None:
        """Take nothing more, and stay only as long as nobody else could answer for what is live."""
        drain = Drain(self._member, self._settings.drain_s)
        self._replicas.clear()  # who counted on whom leaves nobody: only who beats from now on
        for pull in pulling:
            await pull.close()
        while not may_leave(len(self._ledger), self._replicas, left_s=drain.left_s):
            drain.tell(len(self._ledger))
            await asyncio.sleep(self._settings.tick_s)
        await self._performer.settle(timeout_s=2.0)
        await drain.done(left=0 if self._replicas else len(self._ledger))

    async def _listen(self) -> None:
        bus = self._bus
        await bus.subscribe(subjects.BEATS, self._on_beat)
        await bus.subscribe(subjects.LOADS, self._on_load)
        await bus.subscribe(subjects.ATTENDED, self._on_attended)
        await self._cached.listen()
        await AttemptDesk(bus).start()
        await bus.bucket(WORKERS, WorkerRegistration).watch(self._on_worker)
        await bus.bucket(REQUEST_RECORDS, RequestRecord).watch(self._on_record, final=_closed)

    @property
    def me(self) -> Incarnation:
        """This replica."""
        return self._member.incarnation

    # What arrives

    def tell(self, event: Event) -> None:
        """Give the ledger `event`, and its orders to the performer."""
        self._metering.heard(event, self._ledger, now_s=self.judged_s)
        effects = self._ledger.handle(event, now_s=self.judged_s, unix_ms=self._bus.unix_ms())
        self._metering.ordered(effects)
        self._performer.order(effects)

    def _on_beat(self, delivery: Delivery) -> None:
        beat: Beat = delivery.decode(Beat)
        now_s = self._member.now_s()
        if beat.service == SERVICE and beat.member != self._member.incarnation:
            (self._replicas.add if beat.ready else self._replicas.discard)(beat.member)
        if beat.leaving:
            self._liveness.left(beat.member, now_s=now_s)
            return
        if beat.member == self._member.incarnation:  # fresh only if it left a moment ago
            now_s = self._member.beat_sent_s(beat.count) or 0.0
        patience_s = beat.patience_ms / 1000
        for found in self._liveness.beat(
            beat.member, now_s=now_s, ready=beat.ready, patience_s=patience_s
        ):
            self._fleet.found(found.member)
            self._metering.found(returned=found.returned)
            if found.returned:
                log.warning("member_returned", member=found.member)
            self._performer.announce(MemberJoined(member=found.member), f"{found.member}.joined")
            self.tell(MemberWasFound(found.member))

    def _on_attended(self, delivery: Delivery) -> None:
        attended: Attended = delivery.decode(Attended)
        self.tell(AnswersAttended(attended.request_ids))

    def _on_load(self, delivery: Delivery) -> None:
        self._fleet.report(delivery.decode(WorkerLoad))

    def _on_worker(self, change: Kept[WorkerRegistration] | Gone) -> None:
        if isinstance(change, Gone):
            worker = Incarnation(change.key)
            self._fleet.unregister(worker)
            self._liveness.left(worker, now_s=self._member.now_s())
            self._fleet.lost(worker)
        else:
            self._tell_strangers(change.value)
            self._fleet.register(change.value)
            self._cached.registered(change.value.worker)
            self.tell(Ticked())

    def _tell_strangers(self, offer: WorkerRegistration) -> None:
        """Say of a new worker with whom it cannot share KV, and why: else nobody would notice."""
        if not self._fleet.registered(offer.worker):
            for other, fields in strangers(offer, self._fleet).items():
                log.warning("kv_incompatible", worker=offer.worker, other=other, fields=fields)

    def _on_record(self, change: Kept[RequestRecord] | Gone) -> None:
        if isinstance(change, Gone):
            self._records.gone(RequestId(change.key))
            self.tell(RecordGone(RequestId(change.key)))
        elif self._records.is_news(change):
            self.tell(RecordSeen(change.value, change.revision))

    # Time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_s)
            now_s = self._member.now_s()
            for lost in self._liveness.tick(now_s=now_s, connected=self._bus.connected):
                log.warning(
                    "member_lost", member=lost.member, silent_ms=round(lost.silent_s * 1000)
                )
                self._metering.lost()
                event = MemberLost(member=lost.member, silent_ms=round(lost.silent_s * 1000))
                self._performer.announce(event, f"{lost.member}.lost")
                self._lose(lost.member)
            for member in self._liveness.departed(now_s=now_s):
                self._lose(member)
            for owner in sorted(self._ledger.peers()):
                if self._liveness.absent(owner, now_s=now_s):
                    self._lose(owner)
            self.tell(Ticked())
            self._metering.now(self._ledger, self._fleet)
            await self._journals.unfollow_idle(self._liveness.alive)

    async def _report_queue(self) -> None:
        load = QueueLoad(
            scheduler=self._member.incarnation,
            queued=self._ledger.queued,
            max_queued=self._settings.max_queued,
            storage_full=self._records.full,
            classes=self._ledger.class_queues(),
        )
        await self._bus.publish(subjects.queue(self._member.incarnation), load)

    def _lose(self, member: Incarnation) -> None:
        self._replicas.discard(member)
        self._fleet.lost(member)
        self.tell(MemberWasLost(member))

    @property
    def judged_s(self) -> float:
        """The judge's clock."""
        return self._liveness.judged_s

    def alive(self, member: Incarnation) -> bool:
        """Whether a worker beats."""
        return self._fleet.alive(member)

    def current(self, request_id: RequestId, attempt: int) -> bool:
        """Whether an attempt is still meant to run."""
        return self._ledger.current(request_id, attempt)


def _closed(record: RequestRecord) -> bool:
    """Whether nobody needs to remember it: the bucket does, for the resume window."""
    return record.state is RecordState.CLOSED

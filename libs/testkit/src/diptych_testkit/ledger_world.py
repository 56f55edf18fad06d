"""Schedulers' ledgers in a made-up world, at random: what the rules must hold against.

A bucket, a journal, workers and schedulers without a bus or a clock. Every step is one random thing
that may happen next: an effect is performed, a message arrives, a worker says something, somebody
dies, freezes or wakes. The rules are checked at each: see `World`.
"""

from collections.abc import Callable
from random import Random

import msgspec

from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_policy.journal import JournalPart, RequestView
from diptych_policy.lifecycle import (
    AdoptionLost,
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
    Journalled,
    MemberWasFound,
    MemberWasLost,
    PublishEnd,
    PublishFence,
    RecordAdopted,
    RecordCreated,
    RecordSeen,
    RequestArrived,
    SaveRecord,
    SendJob,
)
from diptych_testkit.builders import a_request, a_worker
from diptych_testkit.world_crew import Crew
from diptych_testkit.world_members import TOKENS, Scheduler, Worker, request_of


class World:
    """All of it.

    Rules, checked at every step:

    - `Ledger.check` holds after each event.
    - An attempt's job goes to one worker, whoever sends it; never after the sender closed it.
    - A later attempt's job comes after its fence, and its prefix is what stood before that.
    - A request's end is told in one way only.
    """

    def __init__(self, rng: Random, *, requests: int) -> None:
        self.rng = rng
        self.bucket: dict[RequestId, tuple[RequestRecord, int]] = {}
        self.revision = 0
        self.journal: list[JournalPart] = []
        self.stored: dict[RequestId, Request] = {}
        self.requests: dict[RequestId, Request] = {}
        self.unacknowledged: set[RequestId] = set()
        self.events: dict[str, object] = {}
        self.job_of: dict[tuple[RequestId, int], Incarnation] = {}
        self.crew = Crew(rng)
        self.workers = self.crew.workers
        self.schedulers: dict[Incarnation, Scheduler] = {}
        self.known: set[Incarnation] = set()
        self._lives = 0
        self.now_s = 0.0
        for role in ("p", "p", "d", "d", "d"):
            self.add_worker(role)
        for _ in range(2):
            self.add_scheduler()
        for number in range(requests):
            request = a_request(
                f"r{number}",
                stopping=msgspec.structs.replace(a_request().stopping, max_tokens=TOKENS),
                secret=b"secret of r%d" % number,
            )
            self.requests[request.request_id] = self.stored[request.request_id] = request
            self.unacknowledged.add(request.request_id)

    def view(self, request_id: RequestId) -> RequestView:
        """A request as its reader begins with it."""
        return RequestView(request_id, secret=self.requests[request_id].secret)

    # Members

    def add_worker(self, role: str) -> None:
        self._lives += 1
        worker = Worker(Incarnation(f"{role}{self._lives}"))
        self.workers[worker.name] = worker
        self.known.add(worker.name)
        for scheduler in self.schedulers.values():
            self._meet(scheduler, worker)
            self.tell(scheduler, MemberWasFound(worker.name))

    def add_scheduler(self) -> None:
        self._lives += 1
        scheduler = Scheduler(Incarnation(f"s{self._lives}"))
        scheduler.now_s = self.now_s
        scheduler.journal_at = len(self.journal)
        for worker in self.workers.values():
            self._meet(scheduler, worker)
        scheduler.watch.extend(self.bucket.values())
        self.schedulers[scheduler.name] = scheduler
        self.known.add(scheduler.name)

    def _meet(self, scheduler: Scheduler, worker: Worker) -> None:
        role = Role.PREFILL if worker.name.startswith("p") else Role.DECODE
        offer = a_worker(worker.name, role, max_sequences=3, kv_tokens=400)
        scheduler.fleet.register(offer)
        if worker.up and not worker.frozen:
            scheduler.fleet.found(worker.name)

    def lose(self, member: Incarnation) -> None:
        """All awake schedulers notice that `member` is silent."""
        for scheduler in self.awake():
            scheduler.fleet.lost(member)
            self.tell(scheduler, MemberWasLost(member))

    def find(self, member: Incarnation) -> None:
        """All awake schedulers hear `member` again."""
        for scheduler in self.awake():
            scheduler.fleet.found(member)
            self.tell(scheduler, MemberWasFound(member))

    def awake(self) -> list[Scheduler]:
        return [s for s in self.schedulers.values() if not s.frozen]

    # Telling

    def tell(self, scheduler: Scheduler, event: Event) -> None:
        effects = scheduler.ledger.handle(
            event, now_s=scheduler.now_s, unix_ms=round(self.now_s * 1000)
        )
        scheduler.ledger.check()
        for effect in effects:
            request_id = request_of(effect)
            self._check_ordered(scheduler, effect, request_id)
            scheduler.queues[request_id].append(effect)

    def _check_ordered(self, scheduler: Scheduler, effect: Effect, request_id: RequestId) -> None:
        match effect:
            case SaveRecord(record) if record.state is RecordState.CLOSED:
                scheduler.closed.add(request_id)
            case AdoptRecord():
                scheduler.closed.discard(request_id)
            case SendJob() | PublishFence():
                assert request_id not in scheduler.closed, f"{effect} after its end"

    # Performing: as the scheduler's shell does

    def perform(self, scheduler: Scheduler, request_id: RequestId) -> None:
        queue = scheduler.queues[request_id]
        effect = queue[0]
        match effect:
            case CreateRecord(record):
                lost = self._swap(scheduler, record, 0)
                self.unacknowledged.discard(request_id)
                if lost is None:
                    self.tell(scheduler, RecordCreated(request_id))
            case SaveRecord(record):
                lost = self._swap(scheduler, record, scheduler.revisions.get(request_id, 0))
            case AdoptRecord(record, revision):
                lost = None
                self._adopt(scheduler, record, revision)
            case _:
                lost = None
                self._do(scheduler, effect)
        if lost is not None:
            queue.clear()
            self.tell(scheduler, RecordSeen(*lost))
        else:
            queue.popleft()

    def _swap(
        self, scheduler: Scheduler, record: RequestRecord, revision: int
    ) -> tuple[RequestRecord, int] | None:
        kept = self.bucket.get(record.request_id)
        if kept is not None and kept[0] == record:
            scheduler.revisions[record.request_id] = kept[1]
            return None
        if (kept[1] if kept else 0) != revision:
            if kept is not None:
                scheduler.revisions[record.request_id] = kept[1]
            return kept
        scheduler.revisions[record.request_id] = self.write(record)
        return None

    def write(self, record: RequestRecord) -> int:
        self.revision += 1
        self.bucket[record.request_id] = (record, self.revision)
        for scheduler in self.schedulers.values():
            scheduler.watch.append((record, self.revision))
        return self.revision

    def _adopt(self, scheduler: Scheduler, record: RequestRecord, revision: int) -> None:
        lost = self._swap(scheduler, record, revision)
        if lost is not None:
            self.tell(scheduler, AdoptionLost(*lost))
            return
        request_id = record.request_id
        parts = tuple(part for part in self.journal if part.request_id == request_id)
        scheduler.from_[request_id] = len(self.journal)
        self.tell(scheduler, RecordAdopted(record, self.stored.get(request_id), parts))

    def _do(self, scheduler: Scheduler, effect: Effect) -> None:
        match effect:
            case SendJob() | CancelWork():
                scheduler.side.append(effect)
            case PublishFence(_, fence):
                self.journal.append(fence)
            case PublishEnd(_, end):
                self.journal.append(end)
            case EraseRequest(request_id):
                self.stored.pop(request_id, None)
            case Announce(event=event, msg_id=msg_id) if msg_id.endswith(".end"):
                told = self.events.setdefault(msg_id, event)
                assert told == event, f"{msg_id} was told in two ways"
            case Announce() | Bury() | Denounce():
                pass
            case _:
                raise AssertionError(effect)

    def send(self, scheduler: Scheduler, effect: SendJob | CancelWork) -> None:
        """A job or a cancel reaches its worker, if there is one that hears."""
        worker = self.workers.get(effect.worker)
        deaf = worker is None or not worker.up or worker.frozen
        match effect:
            case SendJob(request_id, attempt) if not scheduler.ledger.current(request_id, attempt):
                return
            case SendJob():
                self._check_job(effect)
                answer = None if deaf or worker is None else self.crew.admit(worker, effect.job)
                scheduler.answers.append(
                    JobAnswered(effect.request_id, effect.attempt, effect.worker, answer)
                )
            case CancelWork(_, cancel) if deaf or worker is None:
                self.tell(scheduler, CancelUnheard(effect.worker, cancel))
            case CancelWork(_, cancel):
                assert worker is not None
                for attempt in worker.admission.cancel(cancel.request_id, cancel.attempt):
                    worker.leave((cancel.request_id, attempt))

    def _check_job(self, effect: SendJob) -> None:
        key = (effect.request_id, effect.attempt)
        first = self.job_of.setdefault(key, effect.worker)
        assert first == effect.worker, f"{key} was sent to {first} and {effect.worker}"
        if effect.attempt == 1:
            return
        view = self.view(effect.request_id)
        for part in self.journal:
            if part.request_id == effect.request_id:
                view.apply(part)
                if view.attempt >= effect.attempt:
                    break
        assert view.attempt == effect.attempt, f"{key} was sent before its fence"
        prefix = list(effect.job.generation.prefix_ids)
        assert prefix == view.token_ids, f"{key} has another prefix"

    # What may happen next

    def choices(self) -> list[Callable[[], None]]:
        """Every ordinary step that could be taken now."""
        steps: list[Callable[[], None]] = []
        for scheduler in self.awake():
            steps += self._scheduler_steps(scheduler)
        for worker in self.workers.values():
            if not worker.up or worker.frozen:
                continue
            for key in worker.running:
                steps.append(lambda w=worker, k=key: self.crew.compute(w, k))  # type: ignore[misc]
            if worker.unsaid:
                steps.append(lambda w=worker: self.journal.append(w.unsaid.pop(0)))  # type: ignore[misc]
        return steps

    def _scheduler_steps(self, s: Scheduler) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = [
            lambda r=request_id: self.perform(s, r)  # type: ignore[misc]
            for request_id, queue in s.queues.items()
            if queue
        ]
        if s.side:
            steps.append(lambda: self.send(s, s.side.pop(self.rng.randrange(len(s.side)))))
        if s.answers:
            steps.append(lambda: self.tell(s, s.answers.pop(0)))
        if s.watch:
            steps.append(lambda: self.see(s, *s.watch.popleft()))
        if s.journal_at < len(self.journal):
            steps.append(lambda: self.hear(s))
        if self.unacknowledged:
            steps.append(lambda: self.deliver(s, self.rng.choice(sorted(self.unacknowledged))))
        return steps

    def deliver(self, scheduler: Scheduler, request_id: RequestId) -> None:
        request = self.stored.get(request_id)
        if request is None:
            self.unacknowledged.discard(request_id)
            return
        if request_id not in scheduler.ledger:
            scheduler.from_[request_id] = scheduler.journal_at
        seq = int(request_id[1:]) + 1
        self.tell(scheduler, RequestArrived(request, seq, len(self.journal)))

    def see(self, scheduler: Scheduler, record: RequestRecord, revision: int) -> None:
        request_id = record.request_id
        news = revision > scheduler.revisions.get(request_id, 0)
        if record.state is RecordState.CLOSED:
            scheduler.revisions.pop(request_id, None)
        elif news and record.owner == scheduler.name:
            scheduler.revisions[request_id] = revision
        elif news:
            scheduler.revisions.pop(request_id, None)
        if news:
            self.tell(scheduler, RecordSeen(record, revision))

    def hear(self, scheduler: Scheduler) -> None:
        at = scheduler.journal_at
        scheduler.journal_at += 1
        part = self.journal[at]
        if part.request_id in scheduler.ledger and at >= scheduler.from_.get(part.request_id, 0):
            self.tell(scheduler, Journalled(part))

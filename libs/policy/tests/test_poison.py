"""A request that kills whatever runs it, in a fleet that restarts its workers: who suffers?"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest

from diptych_contracts.dead import Cause
from diptych_contracts.events import RequestDied
from diptych_contracts.fleet import Role, WorkerLoad
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason, TokenEntry
from diptych_contracts.requests import Assignment, Mode, RecordState, Request, RequestRecord
from diptych_contracts.sampling import Stopping
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import (
    Announce,
    Bury,
    Effect,
    EraseRequest,
    Event,
    Journalled,
    MemberWasLost,
    PublishEnd,
    PublishFence,
    RecordCreated,
    RecordGone,
    RecordSeen,
    RequestArrived,
    RequestUnreadable,
    SaveRecord,
    SendJob,
    Ticked,
)
from diptych_policy.limits import Limits
from diptych_policy.recovery import Ledger
from diptych_testkit.builders import GATEWAY, REQUEST, a_load, a_request, a_worker, tokens

POISON = RequestId("poison")
ME = Incarnation("s1")
FRESH = RequestId("fresh")
D1, D2 = Incarnation("d1"), Incarnation("d2")
RESTART_S = 2.0
STEP_S = 0.1


class Scheduler:
    """A ledger and what it knows of the fleet; others' records and telemetry come a step late."""

    def __init__(self, number: int) -> None:
        self.fleet = Fleet()
        self.ledger = Ledger(Incarnation(f"s{number}"), self.fleet)
        self.news: list[Event] = []


@dataclass
class World:
    """Schedulers and their fleet; each job runs where it was sent, a token per step."""

    dies_after: int
    """How many tokens the poison brings before it kills its worker."""
    workers: int
    schedulers: int = 1
    now_s: float = 0.0
    jobs: dict[RequestId, SendJob] = field(default_factory=dict)
    told: list[Effect] = field(default_factory=list)
    owners: dict[RequestId, Scheduler] = field(default_factory=dict)
    answers: Counter[RequestId] = field(default_factory=Counter)
    ends: dict[RequestId, End] = field(default_factory=dict)
    deaths: list[set[RequestId]] = field(default_factory=list)
    """At each, who had only just begun there."""
    away: list[tuple[float, int]] = field(default_factory=list)
    lost: Counter[RequestId] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.replicas = [Scheduler(number) for number in range(self.schedulers)]
        self.alive: set[Incarnation] = set()
        for number in range(self.workers):
            self.join(number)

    def join(self, number: int) -> None:
        worker = Incarnation(f"d{number}-{len(self.deaths)}")
        self.alive.add(worker)
        for replica in self.replicas:
            replica.fleet.register(a_worker(worker, max_sequences=64, kv_tokens=100_000))
            replica.fleet.found(worker)
        for replica in self.replicas:
            self.tell(replica, Ticked())

    def send(self, request: Request) -> None:
        owner = self.replicas[len(self.owners) % self.schedulers]
        self.owners[request.request_id] = owner
        self.tell(owner, RequestArrived(request, 1, 1))
        self.tell(owner, RecordCreated(request.request_id))

    def tell(self, replica: Scheduler, event: Event) -> None:
        unix_ms = round(self.now_s * 1000)
        effects = replica.ledger.handle(event, now_s=self.now_s, unix_ms=unix_ms)
        replica.ledger.check()
        self.told += effects
        for effect in effects:
            match effect:
                case SendJob(request_id=request_id):
                    self.jobs[request_id] = effect
                case PublishFence(fence=fence):
                    self.tell(replica, Journalled(fence))
                case PublishEnd(end=end):
                    self.finish(end)
                case SaveRecord(record):
                    for other in self.replicas:
                        if other is not replica:
                            other.news.append(RecordSeen(record))

    def hear(self, part: TokenEntry | End) -> None:
        self.tell(self.owners[part.request_id], Journalled(part))

    def finish(self, end: End) -> None:
        self.jobs.pop(end.request_id, None)
        if end.request_id not in self.ends:
            self.ends[end.request_id] = end
            self.hear(end)

    def step(self) -> None:
        self.now_s += STEP_S
        for replica in self.replicas:
            news, replica.news = replica.news, []
            for event in news:
                self.tell(replica, event)
        for due_s, number in [a for a in self.away if a[0] <= self.now_s]:
            self.away.remove((due_s, number))
            self.join(number)
        for request_id, job in list(self.jobs.items()):
            if self.jobs.get(request_id) is job:
                self.run(request_id, job)
        running = Counter(job.worker for job in self.jobs.values())
        for replica in self.replicas:
            for worker in self.alive:
                replica.fleet.report(a_load(worker, running=running[worker]))
            self.tell(replica, Ticked())

    def brought(self, request_id: RequestId) -> int:
        return self.answers[request_id] - len(self.jobs[request_id].job.generation.prefix_ids)

    def run(self, request_id: RequestId, job: SendJob) -> None:
        if request_id == POISON and self.brought(request_id) >= self.dies_after:
            self.die(job.worker)
            return
        index = self.answers[request_id]
        self.answers[request_id] += 1
        self.hear(
            TokenEntry(request_id=request_id, attempt=job.attempt, index=index, token_ids=(index,))
        )
        if index + 1 == job.job.generation.stopping.max_tokens:
            reason = EndReason.LENGTH
            self.finish(End(request_id=request_id, attempt=job.attempt, reason=reason))

    def die(self, worker: Incarnation) -> None:
        held = {r for r, job in self.jobs.items() if job.worker == worker}
        self.deaths.append({r for r in held if self.brought(r) < 8} | {POISON})
        self.lost.update(held)
        for request_id in held:
            del self.jobs[request_id]
        self.alive.remove(worker)
        self.away.append((self.now_s + RESTART_S, int(worker[1:].partition("-")[0])))
        for replica in self.replicas:
            replica.fleet.lost(worker)
            replica.fleet.unregister(worker)
            self.tell(replica, MemberWasLost(worker))


def a_long_one(request_id: str, n_tokens: int) -> Request:
    return a_request(request_id, stopping=Stopping(max_tokens=n_tokens))


@pytest.mark.parametrize("schedulers", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("dies_after", [0, 3, 40])
def test_it_ends_failed_and_its_neighbours_do_not(
    dies_after: int, workers: int, schedulers: int
) -> None:
    world = World(dies_after, workers, schedulers)
    innocents = [f"r{number}" for number in range(8)]
    for name in innocents[:4]:
        world.send(a_long_one(name, 150))
    world.send(a_long_one(POISON, 1000))
    for name in innocents[4:]:
        world.send(a_long_one(name, 150))
    for number in range(2000):
        if POISON not in world.ends and number % 20 == 0:
            world.send(a_long_one(f"late{number}", 30))
        world.step()
        if len(world.ends) == len(world.owners):
            break

    assert world.ends[POISON].reason is EndReason.FAILED
    assert world.ends[POISON].cause == Cause.LOST_WORKERS
    reasons = {name: end.reason for name, end in world.ends.items() if name != POISON}
    assert set(reasons.values()) == {EndReason.LENGTH}
    assert len(reasons) == len(world.owners) - 1
    assert world.lost[POISON] == (5 if dies_after < 8 else 9)
    if schedulers == 1:  # others may put newcomers beside it before they know
        assert all(fresh == {POISON} for fresh in world.deaths[-2:]), "nobody else can be blamed"
    late = [name for name in reasons if name.startswith("late")]
    assert max(world.lost[RequestId(name)] for name in late) <= (3 if schedulers == 1 else 5)
    if dies_after < 8:
        assert max(world.lost[RequestId(name)] for name in innocents) <= 5


def test_others_are_served_while_it_is_tried_apart() -> None:
    world = World(0, workers=2)
    world.send(a_long_one(POISON, 10))
    served = []
    for number in range(300):
        name = f"r{number}"
        world.send(a_long_one(name, 5))
        world.step()
        served.append(sum(end.reason is EndReason.LENGTH for end in world.ends.values()))
    died_at = next(n for n in range(300) if served[n] and POISON in world.ends)
    assert world.ends[POISON].reason is EndReason.FAILED
    assert served[died_at] > 0
    for _ in range(100):
        world.step()
    assert len(world.ends) == 301


def test_what_failed_is_buried_then_erased_and_its_record_closed_last() -> None:
    world = World(0, workers=1)
    world.send(a_long_one(POISON, 10))
    for _ in range(200):
        world.step()
    closing = world.told[next(n for n, e in enumerate(world.told) if isinstance(e, Bury)) :]
    assert [type(e) for e in closing] == [Bury, Announce, Announce, EraseRequest, SaveRecord]
    bury, died = closing[0], closing[1]
    assert isinstance(bury, Bury)
    assert isinstance(died, Announce)
    dead = bury.dead
    assert dead.request == a_long_one(POISON, 10)
    assert (dead.cause, dead.lost_attempts, dead.attempts) == (Cause.LOST_WORKERS, 5, 5)
    assert dead.detail.startswith("5 attempts were lost, the last one: d0-4 is gone")
    assert [s.workers for s in dead.setbacks] == [(f"d0-{n}",) for n in range(5)]
    assert [s.apart for s in dead.setbacks] == [False, False, False, True, True]
    assert dead.died_unix_ms > 0
    assert isinstance(died.event, RequestDied)
    assert died.event.workers == tuple(f"d0-{n}" for n in range(5))
    assert died.msg_id == "poison.dead"


def test_what_finishes_is_not_buried() -> None:
    world = World(10_000, workers=1)
    world.send(a_long_one("r1", 3))
    for _ in range(10):
        world.step()
    assert world.ends[REQUEST].reason is EndReason.LENGTH
    assert not [e for e in world.told if isinstance(e, Bury)]


class Suspects:
    """A ledger with two decode workers, and requests that have lost attempts."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.fleet = Fleet()
        self.ledger = Ledger(ME, self.fleet, limits)
        self.now_s = 0.0
        self.sent: dict[RequestId, Incarnation] = {}
        for worker in (D1, D2):
            self.fleet.register(a_worker(worker, Role.DECODE))
            self.fleet.found(worker)

    def tell(self, event: Event) -> list[Effect]:
        effects = self.ledger.handle(event, now_s=self.now_s, unix_ms=0)
        self.ledger.check()
        for effect in list(effects):
            if isinstance(effect, SendJob):
                self.sent[effect.request_id] = effect.worker
            elif isinstance(effect, PublishFence):
                effects += self.tell(Journalled(effect.fence))
        return effects

    def send(self, name: str) -> None:
        request = a_request(name)
        self.tell(RequestArrived(request, 1, 1))
        self.tell(RecordCreated(request.request_id))

    def lose(self, worker: Incarnation) -> list[Effect]:
        self.fleet.lost(worker)
        effects = self.tell(MemberWasLost(worker))
        self.fleet.found(worker)
        return effects + self.tell(Ticked())

    def suspect(self, name: str) -> None:
        """Make `name`, the only request, one."""
        self.send(name)
        for _ in range(3):
            self.lose(self.sent[RequestId(name)])


def test_nobody_joins_a_suspect_and_a_few_tokens_clear_it() -> None:
    case = Suspects()
    case.suspect("r1")
    apart = case.sent[REQUEST]
    for number in range(4):
        case.send(f"other{number}")
    others = {worker for request_id, worker in case.sent.items() if request_id != REQUEST}
    assert others == {D1, D2} - {apart}
    some = tokens(*range(8), attempt=4)
    (saved,) = (e for e in case.tell(Journalled(some)) if isinstance(e, SaveRecord))
    assert saved.record.strikes == 0
    assert saved.record.lost_attempts == 3
    assert saved.record.assignment is not None
    assert not saved.record.assignment.apart
    case.send("later")
    assert case.sent[RequestId("later")] == apart


def test_a_worker_is_kept_back_until_it_is_idle_if_there_are_others() -> None:
    case = Suspects()
    case.suspect("r1")
    case.fleet.report(_busy(D1, 2))
    case.fleet.report(_busy(D2, 3))
    case.lose(case.sent.pop(REQUEST))
    assert REQUEST not in case.sent
    for number in range(2):
        case.send(f"other{number}")
    assert set(case.sent.values()) == {D2}
    case.fleet.report(a_load(D1))
    case.tell(Ticked())
    assert case.sent[REQUEST] == D1


def _busy(worker: Incarnation, running: int = 1) -> WorkerLoad:
    return a_load(worker, running=running)


def waiting_beside_another() -> Suspects:
    """A suspect whose worker is gone; the other one has a request that has just begun."""
    case = Suspects()
    case.suspect("r1")
    apart = case.sent[REQUEST]
    case.send("fresh")
    assert case.sent[FRESH] != apart
    case.fleet.lost(apart)
    case.tell(MemberWasLost(apart))
    del case.sent[REQUEST]
    for waited_s in (0.0, 2.9, 3.1):
        case.now_s = waited_s
        case.tell(Ticked())
        assert REQUEST not in case.sent
    return case


def test_a_suspect_may_run_beside_what_gets_on() -> None:
    case = waiting_beside_another()
    case.send("later")
    assert RequestId("later") not in case.sent, "the worker is kept back for the suspect"
    case.tell(Journalled(tokens(*range(8), of=FRESH)))
    effects = case.tell(Ticked())
    saved = [e.record for e in effects if isinstance(e, SaveRecord)]
    assert case.sent[REQUEST] == case.sent[FRESH]
    assert [(r.request_id, r.assignment and r.assignment.apart) for r in saved] == [(REQUEST, True)]


def test_a_suspect_waits_so_long_and_no_longer() -> None:
    case = waiting_beside_another()
    case.now_s = 19.0
    case.tell(Ticked())
    assert REQUEST not in case.sent
    case.now_s = 20.1
    (saved,) = (e.record for e in case.tell(Ticked()) if isinstance(e, SaveRecord))
    assert case.sent[REQUEST] == case.sent[FRESH]
    assert saved.assignment is not None
    assert not saved.assignment.apart
    case.send("later")
    assert case.sent[RequestId("later")] == case.sent[FRESH]


def test_where_anothers_suspect_runs_nobody_is_put() -> None:
    here, there = Suspects(), Suspects()
    there.suspect("r1")
    apart = there.sent[REQUEST]
    effects = there.lose(apart)
    record = [e.record for e in effects if isinstance(e, SaveRecord)][-1]
    assert record.state is RecordState.ROUTED
    assert record.assignment is not None
    assert record.assignment.apart
    here.tell(RecordSeen(msgspec.structs.replace(record, owner=Incarnation("s2"))))
    for number in range(4):
        here.send(f"other{number}")
    assert record.assignment.decode not in here.sent.values()


def foreign(name: str, state: RecordState, worker: Incarnation | None = None) -> RecordSeen:
    """Another scheduler's suspect."""
    assignment = Assignment(mode=Mode.LOCAL, decode=worker, apart=True) if worker else None
    record = RequestRecord(
        request_id=RequestId(name),
        owner=Incarnation("s2"),
        gateway=GATEWAY,
        state=state,
        strikes=3,
        request_seq=1,
        assignment=assignment,
    )
    return RecordSeen(record)


def test_of_two_schedulers_suspects_one_goes_first() -> None:
    """Both wait for the same idle worker, and would take it in the same moment."""
    case = Suspects()
    case.suspect("r1")
    case.tell(foreign("r0", RecordState.QUEUED))
    case.tell(foreign("r2", RecordState.QUEUED))
    case.lose(case.sent.pop(REQUEST))
    assert REQUEST not in case.sent
    case.tell(foreign("r0", RecordState.ROUTED, D2))
    case.tell(Ticked())
    assert case.sent[REQUEST] == D1
    case.tell(RecordGone(RequestId("r0")))
    case.send("other")
    assert case.sent[RequestId("other")] == D2


def test_a_suspect_is_not_blamed_where_anothers_was_put_beside_it() -> None:
    case = Suspects()
    case.suspect("r1")
    case.tell(foreign("r0", RecordState.ROUTED, case.sent[REQUEST]))
    saved = [e.record for e in case.lose(case.sent[REQUEST]) if isinstance(e, SaveRecord)]
    assert (saved[0].strikes, saved[0].lost_attempts) == (3, 4)
    assert [s.apart for s in saved[0].setbacks] == [False] * 4


def test_a_suspect_whose_deadline_passes_is_buried_too() -> None:
    """Its client would try again, and so would whoever wonders what became of the workers."""
    case = Suspects()
    case.suspect("r1")
    case.lose(case.sent[REQUEST])
    case.now_s = 61.0
    (end,) = (e.end for e in case.tell(Ticked()) if isinstance(e, PublishEnd))
    assert (end.reason, end.cause) == (EndReason.EXPIRED, Cause.LOST_WORKERS)
    (bury,) = (e for e in case.tell(Journalled(end)) if isinstance(e, Bury))
    assert bury.dead.cause is Cause.LOST_WORKERS
    assert len(case.ledger) == 0


def test_an_end_of_an_older_scheduler_names_no_cause() -> None:
    case = Suspects()
    case.send("r1")
    assert case.ledger.recorded(REQUEST)
    old = End(request_id=REQUEST, attempt=1, reason=EndReason.FAILED, detail="why")
    (bury,) = (e for e in case.tell(Journalled(old)) if isinstance(e, Bury))
    assert (bury.dead.cause, bury.dead.detail) == (Cause.FAILED_ATTEMPTS, "why")
    assert not case.ledger.recorded(REQUEST)


def test_a_request_at_its_last_delivery_is_not_tried_but_ends() -> None:
    case = Suspects()
    case.tell(RequestArrived(a_request(), 1, 1, deliveries=5))
    effects = case.tell(RecordCreated(REQUEST))
    assert REQUEST not in case.sent
    (end,) = (e.end for e in effects if isinstance(e, PublishEnd))
    assert (end.reason, end.cause) == (EndReason.FAILED, Cause.UNDELIVERABLE)
    assert end.detail == "it was handed out 5 times and never taken on"
    (bury,) = (e for e in case.tell(Journalled(end)) if isinstance(e, Bury))
    assert bury.dead.request == a_request()


def test_what_is_no_request_gets_a_record_and_an_end() -> None:
    case = Suspects()
    effects = case.tell(RequestUnreadable(REQUEST, GATEWAY, 7, "expected a Request"))
    kinds = [type(e).__name__ for e in effects]
    assert kinds == [
        *("CreateRecord", "PublishEnd", "Announce", "Announce", "EraseRequest"),
        "SaveRecord",
    ]
    (end,) = (e.end for e in effects if isinstance(e, PublishEnd))
    assert (end.reason, end.cause) == (EndReason.FAILED, Cause.UNREADABLE)
    assert len(case.ledger) == 0

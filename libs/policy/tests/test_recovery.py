from collections.abc import Iterable
from typing import TypeVar

import msgspec
import pytest

from diptych_contracts.dead import Cause
from diptych_contracts.events import RequestEnded
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import (
    Cancel,
    GenerateJob,
    JobAccepted,
    JobAnswer,
    JobRefused,
    PrefillJob,
    RefusalReason,
)
from diptych_contracts.journal import AttemptFailed, End, EndReason, Fence, Started
from diptych_contracts.requests import PriorityClass, RecordState, Request, RequestRecord
from diptych_policy.attendance import SILENT_GATEWAY_S
from diptych_policy.fleet import Fleet
from diptych_policy.journal import JournalPart
from diptych_policy.lifecycle import (
    AdoptionLost,
    AdoptRecord,
    Announce,
    AnswersAttended,
    CancelUnheard,
    CancelWork,
    CreateRecord,
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
    RecordGone,
    RecordSeen,
    RequestArrived,
    SaveRecord,
    SendJob,
    Ticked,
)
from diptych_policy.recovery import Ledger
from diptych_testkit.builders import (
    GATEWAY,
    REQUEST,
    a_request,
    a_worker,
    an_end,
    by_reference,
    tokens,
)

ME = Incarnation("scheduler-me")
OTHER = Incarnation("scheduler-other")
P1, D1, D2 = (Incarnation(name) for name in ("p1", "d1", "d2"))

E = TypeVar("E")


class Case:
    """A ledger, its fleet, and a clock."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.ledger = Ledger(ME, self.fleet)
        self.now_s = 0.0

    def join(self, *workers: Incarnation) -> list[Effect]:
        for worker in workers:
            role = Role.PREFILL if worker.startswith("p") else Role.DECODE
            self.fleet.register(a_worker(worker, role))
            self.fleet.found(worker)
        return self.tell(Ticked())

    def lose(self, member: Incarnation) -> list[Effect]:
        self.fleet.lost(member)
        return self.tell(MemberWasLost(member))

    def found(self, member: Incarnation) -> list[Effect]:
        self.fleet.found(member)
        return self.tell(MemberWasFound(member))

    def tell(self, event: Event) -> list[Effect]:
        effects = self.ledger.handle(event, now_s=self.now_s, unix_ms=round(self.now_s * 1000))
        self.ledger.check()
        return effects

    def hear(self, part: JournalPart) -> list[Effect]:
        return self.tell(Journalled(part))

    def wait(self, seconds: float) -> list[Effect]:
        self.now_s += seconds
        return self.tell(Ticked())

    def accept(self, request: Request | None = None) -> list[Effect]:
        request = request or a_request()
        effects = self.tell(RequestArrived(request, request_seq=7, journal_seq=3, stored_unix_ms=0))
        return effects + self.tell(RecordCreated(request.request_id))


def only(kind: type[E], effects: Iterable[Effect]) -> E:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, f"expected one {kind.__name__} in {effects}"
    return found[0]


def none(kind: type[Effect], effects: Iterable[Effect]) -> bool:
    return not any(isinstance(effect, kind) for effect in effects)


def fence(attempt: int) -> Fence:
    return Fence(request_id=REQUEST, attempt=attempt)


def started(worker: Incarnation, attempt: int = 1) -> Started:
    return Started(request_id=REQUEST, attempt=attempt, worker=worker, phase="decode")


def refused(reason: RefusalReason, attempt: int = 1) -> JobAnswer:
    return JobRefused(request_id=REQUEST, attempt=attempt, reason=reason)


def failed(worker: Incarnation, *, attempt: int = 1, retryable: bool = True) -> AttemptFailed:
    return AttemptFailed(
        request_id=REQUEST,
        attempt=attempt,
        worker=worker,
        reason="unverified_kv",
        detail="checksum",
        retryable=retryable,
    )


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.fixture
def running(case: Case) -> Case:
    """A request routed to (p1, d1), with d2 idle."""
    case.join(P1, D1)
    case.accept()
    case.join(D2)
    return case


def test_a_request_is_recorded_routed_and_announced(case: Case) -> None:
    case.join(P1, D1)
    effects = case.accept()
    created = only(CreateRecord, effects).record
    assert (created.owner, created.state) == (ME, RecordState.QUEUED)
    assert (created.request_seq, created.journal_seq) == (7, 3)
    saved = only(SaveRecord, effects).record
    assert saved.state is RecordState.ROUTED
    sent = only(SendJob, effects)
    assert (sent.worker, sent.attempt) == (P1, 1)
    assert isinstance(sent.job, PrefillJob)
    assert (sent.job.decode_worker, sent.job.link) == (D1, "shm")
    assert sent.job.generation.budget_ms == 3_600_000
    assert {e.msg_id for e in effects if isinstance(e, Announce)} == {
        "r1.queued",
        "r1.routed.1",
    }


def test_nothing_is_routed_before_the_record_stands(case: Case) -> None:
    case.join(P1, D1)
    effects = case.tell(RequestArrived(a_request(), 7, 3))
    assert [type(effect) for effect in effects] == [CreateRecord]
    assert case.tell(RequestArrived(a_request(), 7, 3)) == []
    assert case.tell(RecordCreated(a_request("never").request_id)) == []


def test_a_request_waits_for_workers(case: Case) -> None:
    assert none(SendJob, case.accept())
    assert case.ledger.queued == 1
    sent = only(SendJob, case.join(D1))
    assert isinstance(sent.job, GenerateJob)


def test_an_end_closes_the_record_once(running: Case) -> None:
    running.hear(tokens(4, 5))
    effects = running.hear(an_end(tokens=2))
    closed = only(SaveRecord, effects).record
    assert closed.state is RecordState.CLOSED
    assert closed.end == an_end(tokens=2)
    assert only(Announce, effects).msg_id == "r1.end"
    assert only(EraseRequest, effects).request_seq == 7
    assert len(running.ledger) == 0
    assert running.hear(an_end()) == []
    assert running.tell(Ticked()) == []


def test_the_books_are_told_whose_it_was_and_what_it_used(case: Case) -> None:
    case.join(P1, D1)
    effects = case.accept(a_request(tenant="acme"))
    assert only(CreateRecord, effects).record.tenant == "acme"
    case.hear(tokens(4, 5))
    told = only(Announce, case.hear(an_end(tokens=2))).event
    assert isinstance(told, RequestEnded)
    assert (told.tenant, told.prompt_tokens, told.answer_tokens) == ("acme", 3, 2)


def test_of_those_that_wait_the_class_goes_first_then_who_came_first(case: Case) -> None:
    batch, interactive = PriorityClass.BATCH, PriorityClass.INTERACTIVE
    came = (("b1", batch), ("i1", interactive), ("b2", batch), ("i2", interactive))
    for name, priority_class in came:
        case.accept(a_request(name, priority_class=priority_class))
    placed = [e.request_id for e in case.join(D1) if isinstance(e, SendJob)]
    assert placed == ["i1", "i2", "b1", "b2"]


def test_a_long_prompt_is_named_in_every_job_and_deleted_at_the_end(case: Case) -> None:
    request, _ = by_reference(a_request(prompt_ids=tuple(range(100))))
    case.join(P1, D1, D2)
    sent = only(SendJob, case.accept(request))
    assert (sent.job.generation.prompt, sent.job.generation.prompt_tokens) == (request.prompt, 100)
    case.hear(started(D1))
    case.hear(tokens(4, 5))
    case.lose(D1)
    again = only(SendJob, case.hear(fence(2))).job.generation
    assert (again.prompt, again.prefix_ids) == (request.prompt, (4, 5))
    assert only(EraseRequest, case.hear(an_end(attempt=2))).prompt == request.request_id


def test_a_dead_decode_worker_costs_one_attempt_and_no_token(running: Case) -> None:
    running.hear(started(D1))
    running.hear(tokens(4, 5))
    effects = running.lose(D1)
    saved = only(SaveRecord, effects).record
    assert (saved.attempt, saved.lost_attempts, saved.assignment) == (2, 1, None)
    assert effects.index(only(SaveRecord, effects)) < effects.index(only(PublishFence, effects))
    assert none(SendJob, effects)
    running.hear(tokens(6, index=2))
    sent = only(SendJob, running.hear(fence(2)))
    assert isinstance(sent.job, PrefillJob)
    assert sent.job.decode_worker == D2
    assert sent.job.generation.prefix_ids == (4, 5, 6)
    assert sent.job.generation.attempt == 2


def test_a_worker_that_only_froze_is_told_to_stop(running: Case) -> None:
    effects = running.lose(D1)
    cancelled = only(CancelWork, effects)
    assert (cancelled.worker, cancelled.cancel.attempt) == (P1, 1)


def test_a_dead_prefill_worker_matters_only_before_the_hand_over(running: Case) -> None:
    running.hear(tokens(4))
    running.hear(started(D1))
    assert running.lose(P1) == []


def test_a_dead_prefill_worker_before_the_hand_over_costs_an_attempt(running: Case) -> None:
    running.hear(tokens(4))
    assert only(PublishFence, running.lose(P1)).fence == fence(2)
    sent = only(SendJob, running.hear(fence(2)))
    assert isinstance(sent.job, GenerateJob)
    assert sent.job.generation.prefix_ids == (4,)


def test_a_hand_over_of_an_older_attempt_is_none_of_this_one(running: Case) -> None:
    running.lose(D1)
    running.hear(fence(2))
    running.hear(started(D1, attempt=1))
    assert only(PublishFence, running.lose(P1)).fence == fence(3)


def test_five_lost_attempts_end_a_request(case: Case) -> None:
    case.join(D1)
    case.accept()
    for attempt in range(2, 6):
        case.lose(D1)
        case.fleet.found(D1)
        only(SendJob, case.hear(fence(attempt)))
    end = only(PublishEnd, case.lose(D1)).end
    assert end.reason is EndReason.FAILED
    assert "5 attempts were lost" in end.detail
    assert only(SaveRecord, case.hear(end)).record.state is RecordState.CLOSED


def test_a_refusal_is_routed_elsewhere_under_a_new_attempt(running: Case) -> None:
    effects = running.tell(JobAnswered(REQUEST, 1, P1, refused(RefusalReason.NO_ROOM)))
    assert only(SaveRecord, effects).record.lost_attempts == 0
    assert none(SendJob, running.hear(fence(2)))
    sent = only(SendJob, running.wait(0.1))
    assert sent.attempt == 2
    assert isinstance(sent.job, GenerateJob | PrefillJob)
    assert sent.worker != P1


def test_an_accepted_or_stale_answer_changes_nothing(running: Case) -> None:
    accepted = JobAccepted(request_id=REQUEST, attempt=1)
    assert running.tell(JobAnswered(REQUEST, 1, P1, accepted)) == []
    assert running.tell(JobAnswered(REQUEST, 9, P1, None)) == []
    assert running.ledger.current(REQUEST, 1)


def test_a_worker_that_does_not_answer_is_as_good_as_dead(running: Case) -> None:
    effects = running.tell(JobAnswered(REQUEST, 1, P1, None))
    assert only(SaveRecord, effects).record.lost_attempts == 1


def test_a_refusal_for_lateness_expires_the_request(running: Case) -> None:
    effects = running.tell(JobAnswered(REQUEST, 1, P1, refused(RefusalReason.EXPIRED)))
    assert only(PublishEnd, effects).end.reason is EndReason.EXPIRED


def test_a_failed_attempt_is_tried_elsewhere_five_times_in_a_row(running: Case) -> None:
    for attempt in range(1, 5):
        running.now_s += 5
        assert not none(PublishFence, running.hear(failed(D1, attempt=attempt)))
        running.hear(fence(attempt + 1))
        running.wait(2)
    end = only(PublishEnd, running.hear(failed(D1, attempt=5))).end
    assert end.reason is EndReason.FAILED
    assert "unverified_kv" in end.detail


def test_progress_forgives_failures(running: Case) -> None:
    for attempt in range(1, 9):
        assert not none(PublishFence, running.hear(failed(D1, attempt=attempt)))
        running.hear(fence(attempt + 1))
        running.wait(3)
        running.hear(tokens(attempt, index=attempt - 1, attempt=attempt + 1))
    assert REQUEST in running.ledger


def test_a_failure_that_cannot_be_retried_ends_the_request(running: Case) -> None:
    end = only(PublishEnd, running.hear(failed(D1, retryable=False))).end
    assert end.reason is EndReason.FAILED


def test_a_failure_of_an_older_attempt_is_ignored(running: Case) -> None:
    running.lose(D1)
    running.hear(fence(2))
    assert running.hear(failed(P1, attempt=1)) == []


def test_a_prefix_that_is_already_complete_ends_by_length(case: Case) -> None:
    case.join(D1)
    case.accept()
    case.hear(tokens(*range(16)))
    case.lose(D1)
    end = only(PublishEnd, case.hear(fence(2))).end
    assert (end.reason, end.tokens) == (EndReason.LENGTH, 16)


def test_a_cancel_reaches_workers_record_and_journal(running: Case) -> None:
    record = RequestRecord(
        request_id=REQUEST,
        owner=ME,
        gateway=GATEWAY,
        state=RecordState.CANCELLING,
        cancel_reason="client left",
    )
    effects = running.tell(RecordSeen(record))
    end = only(PublishEnd, effects).end
    assert (end.reason, end.detail) == (EndReason.CANCELLED, "client left")
    assert only(SaveRecord, effects).record.state is RecordState.ENDING
    assert running.tell(RecordSeen(record)) == []
    assert only(EraseRequest, running.hear(end)).request_seq == 7


def test_a_cancel_that_came_before_the_request_ends_it_at_once(case: Case) -> None:
    case.tell(RequestArrived(a_request(), 7, 3))
    cancelling = RequestRecord(
        request_id=REQUEST, owner=GATEWAY, gateway=GATEWAY, state=RecordState.CANCELLING
    )
    effects = case.tell(RecordSeen(cancelling))
    saved = only(SaveRecord, effects).record
    assert (saved.owner, saved.request_seq) == (ME, 7)
    assert only(PublishEnd, effects).end.reason is EndReason.CANCELLED


def test_a_gateway_that_ends_a_request_stops_its_workers(running: Case) -> None:
    end = an_end(EndReason.EXPIRED)
    record = RequestRecord(
        request_id=REQUEST, owner=ME, gateway=GATEWAY, state=RecordState.ENDING, end=end
    )
    running.tell(RecordSeen(record))
    assert only(PublishEnd, running.wait(2.1)).end == end
    assert none(SendJob, running.hear(end))


def test_another_owner_or_a_closed_record_makes_the_ledger_forget(running: Case) -> None:
    foreign = RequestRecord(
        request_id=REQUEST, owner=OTHER, gateway=GATEWAY, state=RecordState.ROUTED, request_seq=7
    )
    assert running.tell(RecordSeen(foreign)) == []
    assert REQUEST not in running.ledger
    assert OTHER in running.ledger.peers()
    running.tell(RecordGone(REQUEST))
    assert running.ledger.peers() == set()


def test_a_deleted_record_is_written_again(running: Case) -> None:
    """Forgotten, the request had no end, and nobody had it run elsewhere if its worker died."""
    running.tell(RecordGone(REQUEST))
    assert none(SaveRecord, running.wait(1.0))
    saved = only(SaveRecord, running.wait(1.1)).record
    assert (saved.state, saved.owner) == (RecordState.ROUTED, ME)
    assert none(SaveRecord, running.wait(3.0))


def test_a_deleted_record_is_not_written_again_once_the_journal_tells_the_end(
    running: Case,
) -> None:
    running.tell(RecordGone(REQUEST))
    running.hear(End(request_id=REQUEST, attempt=1, reason=EndReason.STOP))
    assert none(SaveRecord, running.wait(3.0))
    assert len(running.ledger) == 0


def test_a_fence_that_is_not_heard_is_published_again(running: Case) -> None:
    """Purged before it was read, it once kept its request waiting until the total deadline."""
    attempt = only(PublishFence, running.tell(MemberWasLost(D1))).fence.attempt
    assert none(PublishFence, running.wait(1.0))
    assert only(PublishFence, running.wait(1.1)).fence.attempt == attempt
    assert only(PublishFence, running.wait(2.1)).fence.attempt == attempt


def test_a_closed_record_is_forgotten(case: Case) -> None:
    case.accept()
    closed = RequestRecord(request_id=REQUEST, owner=ME, gateway=GATEWAY, state=RecordState.CLOSED)
    case.tell(RecordSeen(closed))
    assert len(case.ledger) == 0


def test_a_dead_gateways_requests_are_cancelled(running: Case) -> None:
    assert running.ledger.gateways() == {GATEWAY}
    assert none(PublishEnd, running.lose(GATEWAY))
    end = only(PublishEnd, running.wait(SILENT_GATEWAY_S)).end
    assert end.reason is EndReason.CANCELLED


def test_a_gateway_that_was_only_busy_loses_no_request(running: Case) -> None:
    """Nine of 200 requests, on a machine at load 40."""
    assert none(PublishEnd, running.lose(GATEWAY))
    assert none(PublishEnd, running.wait(0.9 * SILENT_GATEWAY_S))
    running.tell(MemberWasFound(GATEWAY))
    assert none(PublishEnd, wait_running(running, 60))


def orphaned(case: Case, **intent: bool) -> Case:
    """A running request whose gateway is gone."""
    case.join(P1, D1)
    case.accept(a_request(**intent))
    assert none(PublishEnd, case.lose(GATEWAY))
    return case


def wait_running(case: Case, seconds: float) -> list[Effect]:
    """Let time pass while tokens keep coming."""
    effects: list[Effect] = []
    for _ in range(round(seconds)):
        index = len(case.ledger._live[REQUEST].view.token_ids) if REQUEST in case.ledger else 0
        effects += case.hear(tokens(4, index=index))
        effects += case.wait(1.0)
    return effects


def test_a_dead_gateways_request_with_resume_intent_is_cancelled_after_its_grace(
    case: Case,
) -> None:
    orphaned(case, resume=True)
    assert none(PublishEnd, wait_running(case, 29))
    assert none(PublishEnd, case.lose(GATEWAY))
    end = only(PublishEnd, wait_running(case, 2)).end
    assert (end.reason, end.detail) == (EndReason.CANCELLED, f"{GATEWAY} is gone")


def test_a_reader_at_another_gateway_keeps_an_orphan_alive(case: Case) -> None:
    orphaned(case, resume=True)
    for _ in range(5):
        assert none(PublishEnd, wait_running(case, 20))
        case.tell(AnswersAttended((RequestId("other"), REQUEST)))
    assert none(PublishEnd, wait_running(case, 29))
    assert only(PublishEnd, wait_running(case, 2)).end.reason is EndReason.CANCELLED


def test_a_background_request_outlives_its_gateway(case: Case) -> None:
    orphaned(case, background=True)
    assert none(PublishEnd, wait_running(case, 120))
    case.hear(an_end(tokens=120))
    assert len(case.ledger) == 0


def test_a_gateway_that_was_only_frozen_knows_its_readers(case: Case) -> None:
    orphaned(case, resume=True)
    wait_running(case, 20)
    case.tell(MemberWasFound(GATEWAY))
    assert none(PublishEnd, wait_running(case, 60))


def test_an_orphan_adopted_by_another_scheduler_has_its_grace_there(case: Case) -> None:
    request = a_request(resume=True)
    record = msgspec.structs.replace(routed_to(Case(), P1, D1), owner=OTHER)
    case.join(P1, D1)
    adopt(case, record, tokens(4), started(D1), request=request)
    assert none(PublishEnd, case.lose(GATEWAY))
    assert none(PublishEnd, wait_running(case, 29))
    assert only(PublishEnd, wait_running(case, 2)).end.reason is EndReason.CANCELLED


def test_no_first_token_in_time_expires_and_says_why(case: Case) -> None:
    case.accept()
    assert case.wait(59) == []
    end = only(PublishEnd, case.wait(1.1)).end
    assert end.reason is EndReason.EXPIRED
    assert "no worker serves" in end.detail


def test_silence_between_tokens_costs_an_attempt(running: Case) -> None:
    running.hear(tokens(4))
    assert running.wait(4.9) == []
    effects = running.wait(0.2)
    assert only(SaveRecord, effects).record.lost_attempts == 1
    running.hear(fence(2))
    assert running.wait(50) == []
    assert not none(PublishFence, running.wait(11))


def test_the_total_deadline_is_wall_time(running: Case) -> None:
    effects = running.ledger.handle(Ticked(), now_s=1.0, unix_ms=3_600_000)
    assert only(PublishEnd, effects).end.reason is EndReason.EXPIRED


def test_an_end_that_is_not_heard_is_published_again(case: Case) -> None:
    case.accept()
    end = only(PublishEnd, case.wait(61)).end
    assert case.wait(1) == []
    assert only(PublishEnd, case.wait(1.1)).end == end


def an_orphan(**changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": REQUEST,
        "owner": OTHER,
        "gateway": GATEWAY,
        "state": RecordState.ROUTED,
        "request_seq": 7,
        "journal_seq": 3,
        "deadline_unix_ms": 3_600_000,
    }
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


def adopt(
    case: Case, record: RequestRecord, *parts: JournalPart, request: Request | None = None
) -> list[Effect]:
    case.tell(RecordSeen(record))
    adopted = only(AdoptRecord, case.lose(OTHER)).record
    assert (adopted.owner, adopted.adoptions) == (ME, record.adoptions + 1)
    case.tell(RecordSeen(adopted))
    return case.tell(RecordAdopted(adopted, request or a_request(), parts))


def routed_to(case: Case, *workers: Incarnation) -> RequestRecord:
    case.join(*workers)
    return only(SaveRecord, case.accept()).record


def test_an_adopter_lets_running_work_run(case: Case) -> None:
    record = msgspec.structs.replace(routed_to(Case(), P1, D1), owner=OTHER)
    case.join(P1, D1)
    (saved,) = adopt(case, record, tokens(4), started(D1))
    assert isinstance(saved, SaveRecord)
    assert (saved.record.adoptions, saved.record.adopted_tokens) == (0, 1)
    assert case.ledger.current(REQUEST, 1)
    effects = case.hear(an_end(tokens=1))
    assert only(SaveRecord, effects).record.adoptions == 0


def test_an_adoption_without_a_new_token_is_no_progress(case: Case) -> None:
    record = msgspec.structs.replace(
        routed_to(Case(), P1, D1), owner=OTHER, adoptions=3, adopted_tokens=1
    )
    case.join(P1, D1)
    end = only(PublishEnd, adopt(case, record, tokens(4), started(D1))).end
    assert (end.reason, end.cause) == (EndReason.FAILED, Cause.LOST_SCHEDULERS)


@pytest.mark.parametrize("said", [(), (started(P1),), (tokens(4), started(D1))])
def test_an_adopter_takes_up_a_failure_that_its_owner_did_not_hear(
    case: Case, said: tuple[JournalPart, ...]
) -> None:
    """It asked the worker again, for which that was a duplicate, and waited out the deadline."""
    record = msgspec.structs.replace(routed_to(Case(), P1, D1), owner=OTHER)
    case.join(P1, D1)
    effects = adopt(case, record, *said, failed(P1))
    assert none(SendJob, effects)
    assert only(PublishFence, effects).fence.attempt == 2
    assert not case.ledger.current(REQUEST, 1)


def test_an_adopter_ends_what_no_worker_can_do(case: Case) -> None:
    record = msgspec.structs.replace(routed_to(Case(), P1, D1), owner=OTHER)
    case.join(P1, D1)
    end = only(PublishEnd, adopt(case, record, failed(P1, retryable=False))).end
    assert (end.reason, end.cause) == (EndReason.FAILED, Cause.IMPOSSIBLE)


def test_an_adopter_lets_the_failure_of_an_older_attempt_rest(case: Case) -> None:
    record = msgspec.structs.replace(routed_to(Case(), P1, D1), owner=OTHER, attempt=2)
    case.join(P1, D1)
    assert only(SendJob, adopt(case, record, failed(P1), fence(2))).attempt == 2


def test_an_adopter_sends_a_job_again_that_may_never_have_left(case: Case) -> None:
    record = msgspec.structs.replace(routed_to(Case(), P1, D1), owner=OTHER)
    case.join(P1, D1)
    sent = only(SendJob, adopt(case, record))
    assert (sent.attempt, sent.worker) == (1, P1)


def test_an_adopter_replaces_dead_workers(case: Case) -> None:
    record = msgspec.structs.replace(routed_to(Case(), P1, D1), owner=OTHER)
    case.join(P1, D2)
    assert only(PublishFence, adopt(case, record, tokens(4))).fence == fence(2)


def test_an_adopter_publishes_a_fence_that_is_missing(case: Case) -> None:
    case.join(D1)
    orphan = an_orphan(state=RecordState.QUEUED, attempt=2)
    assert only(PublishFence, adopt(case, orphan, tokens(4))).fence == fence(2)
    assert not none(SendJob, case.hear(fence(2)))


def test_an_adopter_places_what_was_queued(case: Case) -> None:
    case.join(D1)
    assert not none(SendJob, adopt(case, an_orphan(state=RecordState.QUEUED)))


def test_an_adopter_closes_what_has_ended(case: Case) -> None:
    effects = adopt(case, an_orphan(), tokens(4), an_end(tokens=1))
    assert only(SaveRecord, effects).record.state is RecordState.CLOSED


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (an_orphan(state=RecordState.CANCELLING, cancel_reason="left"), EndReason.CANCELLED),
        (an_orphan(state=RecordState.ENDING), EndReason.FAILED),
        (
            an_orphan(state=RecordState.ENDING, end=an_end(EndReason.EXPIRED)),
            EndReason.EXPIRED,
        ),
        (an_orphan(adoptions=3), EndReason.FAILED),
    ],
)
def test_an_adopter_ends_what_was_ending(
    case: Case, record: RequestRecord, reason: EndReason
) -> None:
    assert only(PublishEnd, adopt(case, record)).end.reason is reason


def test_a_record_whose_request_is_gone_is_closed(case: Case) -> None:
    record = an_orphan()
    case.tell(RecordSeen(record))
    adopted = only(AdoptRecord, case.lose(OTHER)).record
    effects = case.tell(RecordAdopted(adopted, None, ()))
    assert only(PublishEnd, effects).end.reason is EndReason.FAILED
    assert only(SaveRecord, effects).record.state is RecordState.CLOSED


@pytest.mark.parametrize(
    "record",
    [
        an_orphan(request_seq=0, state=RecordState.CANCELLING),
        an_orphan(state=RecordState.CLOSED),
    ],
)
def test_records_that_nobody_can_serve_are_not_adopted(case: Case, record: RequestRecord) -> None:
    case.tell(RecordSeen(record))
    assert case.lose(OTHER) == []


def test_records_of_a_living_owner_are_not_adopted(case: Case) -> None:
    case.tell(RecordSeen(an_orphan()))
    assert case.lose(Incarnation("scheduler-third")) == []
    assert not none(AdoptRecord, case.lose(OTHER))


def test_an_adoption_told_twice_counts_once(case: Case) -> None:
    adopt(case, an_orphan(state=RecordState.QUEUED))
    again = RecordAdopted(an_orphan(owner=ME), a_request(), ())
    assert case.tell(again) == []


def test_a_record_is_closed_last(running: Case) -> None:
    effects = running.hear(an_end())
    assert [type(effect) for effect in effects] == [Announce, EraseRequest, SaveRecord]
    assert only(Announce, effects).first


def test_an_adopter_names_the_revision_it_decided_on(case: Case) -> None:
    case.tell(RecordSeen(an_orphan(), 5))
    assert only(AdoptRecord, case.lose(OTHER)).revision == 5


def test_the_loser_of_an_adoption_may_adopt_later(case: Case) -> None:
    third = Incarnation("scheduler-third")
    case.tell(RecordSeen(an_orphan(), 5))
    only(AdoptRecord, case.lose(OTHER))
    assert case.tell(AdoptionLost(an_orphan(owner=third, adoptions=1), 6)) == []
    assert case.ledger.peers() == {third}
    again = only(AdoptRecord, case.lose(third))
    assert (again.record.adoptions, again.revision) == (2, 6)


def test_an_adoption_lost_to_the_end_is_over(case: Case) -> None:
    case.tell(RecordSeen(an_orphan(), 5))
    case.lose(OTHER)
    assert case.tell(AdoptionLost(an_orphan(state=RecordState.CLOSED), 6)) == []
    assert case.ledger.peers() == set()
    assert case.lose(OTHER) == []


def test_what_the_watch_says_while_adopting_does_not_adopt_again(case: Case) -> None:
    case.tell(RecordSeen(an_orphan(), 5))
    adopted = only(AdoptRecord, case.lose(OTHER)).record
    assert case.tell(RecordSeen(an_orphan(), 5)) == []
    assert case.tell(RecordSeen(adopted, 6)) == []
    assert case.lose(OTHER) == []


def test_an_own_record_that_is_marked_while_it_is_closed_is_looked_at_again(running: Case) -> None:
    running.hear(an_end())
    marked = an_orphan(owner=ME, state=RecordState.CANCELLING)
    again = only(AdoptRecord, running.tell(RecordSeen(marked, 9)))
    assert (again.record, again.revision) == (marked, 9)
    effects = running.tell(RecordAdopted(marked, None, (an_end(),)))
    assert only(SaveRecord, effects).record.end == an_end()
    assert none(PublishEnd, effects)


def test_a_frozen_worker_is_told_to_stop_when_it_wakes(running: Case) -> None:
    running.lose(D1)
    cancel = Cancel(request_id=REQUEST, attempt=1)
    assert running.found(D1) == [CancelWork(D1, cancel)]
    assert running.found(D1) == []


def test_a_cancel_that_was_cut_off_by_a_freeze_is_sent_again(running: Case) -> None:
    cancel = Cancel(request_id=REQUEST, attempt=1)
    assert running.tell(CancelUnheard(D1, cancel)) == []
    assert running.found(D1) == [CancelWork(D1, cancel)]


def test_a_worker_whose_registration_has_expired_is_not_waited_for(running: Case) -> None:
    running.lose(D1)
    running.fleet.unregister(D1)
    running.wait(0.1)
    assert running.found(D1) == []


def test_a_mark_on_an_older_attempt_does_not_turn_the_attempt_back(running: Case) -> None:
    """It once ended attempt 1 behind the fence of attempt 2: an end that never counted."""
    stale = only(SaveRecord, running.lose(D1)).record
    marked = msgspec.structs.replace(
        stale, attempt=1, state=RecordState.CANCELLING, cancel_reason="left"
    )
    effects = running.tell(RecordSeen(marked))
    assert only(SaveRecord, effects).record.attempt == 2
    assert only(PublishEnd, effects).end.attempt == 2
    fenced = effects.index(only(PublishFence, effects))
    assert fenced < effects.index(only(PublishEnd, effects))


def test_an_end_written_by_a_gateway_for_an_older_attempt_is_said_again(running: Case) -> None:
    stale = only(SaveRecord, running.lose(D1)).record
    end = an_end(EndReason.EXPIRED)
    marked = msgspec.structs.replace(stale, attempt=1, state=RecordState.ENDING, end=end)
    effects = running.tell(RecordSeen(marked))
    said = only(PublishEnd, effects).end
    assert (said.attempt, said.reason) == (2, EndReason.EXPIRED)


def test_an_end_is_repeated_behind_its_fence(running: Case) -> None:
    running.lose(D1)
    running.ledger.handle(Ticked(), now_s=0.0, unix_ms=3_600_000)
    effects = running.wait(2.1)
    assert [type(effect) for effect in effects] == [PublishFence, PublishEnd]


def test_an_own_write_that_the_watch_shows_late_changes_nothing(running: Case) -> None:
    assert running.tell(RecordSeen(an_orphan(owner=ME), 4)) == []
    assert running.ledger.current(REQUEST, 1)


def test_a_mark_on_anothers_record_is_anothers_business(running: Case) -> None:
    marked = an_orphan(state=RecordState.CANCELLING, attempt=3)
    assert running.tell(RecordSeen(marked, 9)) == []
    assert REQUEST not in running.ledger
    assert OTHER in running.ledger.peers()


def test_a_fence_of_another_owner_makes_the_ledger_forget(running: Case) -> None:
    assert running.hear(fence(2)) == []
    assert REQUEST not in running.ledger


def test_recovery_with_a_hole_fails_and_says_why(case: Case) -> None:
    case.join(D1)
    record = an_orphan()
    case.tell(RecordSeen(record))
    adopted = only(AdoptRecord, case.lose(OTHER)).record
    parts = (tokens(9, index=7),)
    effects = case.tell(RecordAdopted(adopted, a_request(), parts, whole=False))
    end = only(PublishEnd, effects).end
    assert (end.reason, end.detail) == (
        EndReason.FAILED,
        "the journal holds only a part of its answer",
    )
    assert none(SendJob, effects)


def test_a_hole_does_not_matter_to_what_is_ending_anyhow(case: Case) -> None:
    adopted = an_orphan(owner=ME, state=RecordState.CANCELLING)
    effects = case.tell(RecordAdopted(adopted, a_request(), (), whole=False))
    assert only(PublishEnd, effects).end.reason is EndReason.CANCELLED


def test_an_adopter_of_a_complete_answer_generates_nothing(case: Case) -> None:
    """It once went on: the answer got a token more than was asked for."""
    case.join(D1)
    queued = an_orphan(state=RecordState.QUEUED, attempt=2)
    end = only(PublishEnd, adopt(case, queued, tokens(*range(16)), fence(2))).end
    assert (end.reason, end.tokens) == (EndReason.LENGTH, 16)


def test_pulling_stops_when_the_queue_is_full() -> None:
    from diptych_policy.limits import Limits

    ledger = Ledger(ME, Fleet(), Limits(max_queued=1))
    ledger.handle(RequestArrived(a_request(), 1, 0), now_s=0, unix_ms=0)
    assert not ledger.full
    ledger.handle(RecordCreated(REQUEST), now_s=0, unix_ms=0)
    assert ledger.full


def test_a_broken_invariant_is_named(running: Case) -> None:
    live = running.ledger._live[REQUEST]
    live.view.end = End(request_id=REQUEST, attempt=1, reason=EndReason.STOP)
    with pytest.raises(AssertionError, match="an ended request is gone"):
        running.ledger.check()


def test_the_total_deadline_counts_by_the_buses_clock_not_by_the_gateways() -> None:
    """A gateway whose clock was two hours slow had each of its requests expire at once."""
    case = Case()
    case.join(D1)
    request = a_request(created_unix_ms=-7_200_000)
    case.now_s = 60.0
    arrived = RequestArrived(request, request_seq=7, journal_seq=3, stored_unix_ms=50_000)
    assert only(CreateRecord, case.tell(arrived)).record.deadline_unix_ms == 3_650_000
    job = only(SendJob, case.tell(RecordCreated(REQUEST))).job
    assert job.generation.budget_ms == 3_590_000


def test_what_another_owner_is_to_cancel_is_left_to_whoever_adopts_it(case: Case) -> None:
    """Its owner was dead, its answer complete in the journal; cancelled unread, it ended twice."""
    case.tell(RequestArrived(a_request(), 7, 3))
    theirs = an_orphan(state=RecordState.CANCELLING, cancel_reason="left")
    assert case.tell(RecordSeen(theirs)) == []
    assert REQUEST not in case.ledger
    adopted = only(AdoptRecord, case.lose(OTHER)).record
    complete = (tokens(1, 2), an_end(EndReason.LENGTH, tokens=2))
    effects = case.tell(RecordAdopted(adopted, a_request(), complete))
    assert none(PublishEnd, effects)
    assert only(SaveRecord, effects).record.end == complete[-1]

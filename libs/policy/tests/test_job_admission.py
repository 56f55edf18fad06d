import pytest

from diptych_contracts.ids import RequestId
from diptych_contracts.jobs import RefusalReason
from diptych_policy.job_admission import Admitted, JobAdmission, NotAdmitted

R1, R2 = RequestId("r1"), RequestId("r2")


@pytest.fixture
def admission() -> JobAdmission:
    return JobAdmission(max_sequences=2, kv_tokens=100, max_waiting=3)


def test_the_same_job_again_is_a_duplicate_even_after_it_ended(admission: JobAdmission) -> None:
    assert admission.admit(R1, 1, 10, may_wait=False) == Admitted()
    assert admission.admit(R1, 1, 10, may_wait=False) == Admitted(duplicate=True)
    admission.leave(R1, 1)
    assert admission.past(R1, 1)
    assert admission.admit(R1, 1, 10, may_wait=False) == Admitted(duplicate=True)
    assert len(admission) == 0
    admission.check()


def test_a_job_that_never_ran_may_come_again(admission: JobAdmission) -> None:
    admission.admit(R1, 1, 10, may_wait=False)
    admission.unseat(R1, 1)
    assert not admission.past(R1, 1)
    assert admission.admit(R1, 1, 10, may_wait=False) == Admitted()


def test_a_newer_attempt_names_the_stale_ones(admission: JobAdmission) -> None:
    admission.admit(R1, 1, 10, may_wait=False)
    assert admission.admit(R1, 3, 10, may_wait=False) == Admitted(stale=(1,))


def test_attempts_of_another_request_are_not_stale(admission: JobAdmission) -> None:
    admission.admit(R1, 1, 10, may_wait=False)
    assert admission.admit(R2, 2, 10, may_wait=False) == Admitted()


def test_a_cancelled_attempt_that_comes_late_is_refused(admission: JobAdmission) -> None:
    admission.admit(R1, 1, 10, may_wait=False)
    assert admission.cancel(R1, 2) == (1,)
    assert admission.admit(R1, 2, 10, may_wait=False) == NotAdmitted(RefusalReason.CANCELLED)
    assert admission.admit(R1, 3, 10, may_wait=False) == Admitted(stale=(1,))
    assert admission.cancel(R2, 1) == ()


def test_room_is_counted_at_full_length(admission: JobAdmission) -> None:
    admission.admit(R1, 1, 60, may_wait=False)
    refused = admission.admit(R2, 1, 41, may_wait=False)
    assert refused == NotAdmitted(RefusalReason.NO_ROOM, "needs 41 KV cells, 40 of 100 are free")
    assert admission.admit(R2, 1, 40, may_wait=False) == Admitted()
    assert admission.promised_tokens == 100


def test_what_can_never_fit_is_refused_even_if_it_may_wait(admission: JobAdmission) -> None:
    refused = admission.admit(R1, 1, 101, may_wait=True)
    assert isinstance(refused, NotAdmitted)
    assert refused.reason is RefusalReason.NO_ROOM


def test_seats_run_out_later_for_jobs_that_may_wait(admission: JobAdmission) -> None:
    for number in (1, 2):
        admission.admit(RequestId(f"r{number}"), 1, 10, may_wait=True)
    assert isinstance(admission.admit(RequestId("r3"), 1, 10, may_wait=False), NotAdmitted)
    assert admission.admit(RequestId("r3"), 1, 90, may_wait=True) == Admitted()
    assert isinstance(admission.admit(RequestId("r4"), 1, 10, may_wait=True), NotAdmitted)
    assert sorted(admission) == [("r1", 1), ("r2", 1), ("r3", 1)]


def test_a_draining_worker_takes_nothing_new(admission: JobAdmission) -> None:
    admission.admit(R1, 1, 10, may_wait=False)
    admission.draining = True
    assert admission.admit(R1, 1, 10, may_wait=False) == Admitted(duplicate=True)
    assert admission.admit(R2, 1, 10, may_wait=False) == NotAdmitted(RefusalReason.DRAINING)


def test_memory_of_the_past_is_bounded(admission: JobAdmission) -> None:
    for number in range(5000):
        request_id = RequestId(f"old{number}")
        admission.cancel(request_id, 1)
        admission.admit(request_id, 2, 1, may_wait=False)
        admission.leave(request_id, 2)
    assert not admission.past(RequestId("old0"), 2)
    assert admission.past(RequestId("old4999"), 2)
    assert admission.admit(RequestId("old0"), 1, 1, may_wait=False) == Admitted()


def test_giving_back_a_seat_nobody_has_changes_nothing(admission: JobAdmission) -> None:
    admission.leave(R1, 1)
    assert not admission.past(R1, 1)
    admission.cancel(R1, 3)
    admission.cancel(R1, 2)
    assert admission.admit(R1, 3, 1, may_wait=True) == NotAdmitted(RefusalReason.CANCELLED)


def test_a_seat_that_is_also_past_is_a_broken_invariant(admission: JobAdmission) -> None:
    admission.admit(R1, 1, 1, may_wait=True)
    admission._past[(R1, 1)] = None
    with pytest.raises(AssertionError, match="here and past"):
        admission.check()

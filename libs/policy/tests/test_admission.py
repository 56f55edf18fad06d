"""How many at once, who would be served too late, and when to come back."""

import pytest

from diptych_contracts.fleet import ClassQueue, QueueLoad
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import PriorityClass
from diptych_policy.admission import (
    DRAINING_RETRY_S,
    MAX_RETRY_S,
    MIN_RETRY_S,
    Admission,
    Declined,
    Obstacle,
)

INTERACTIVE, STANDARD, BATCH = PriorityClass


def full(limit: int = 2) -> Admission:
    admission = Admission(limit)
    for _ in range(limit):
        assert admission.enter(INTERACTIVE, now_s=0.0) is None
    return admission


def ended(admission: Admission, priority_class: PriorityClass, *endings_s: float) -> None:
    for ending_s in endings_s:
        admission.leave(priority_class, now_s=ending_s)
        admission.enter(priority_class, now_s=ending_s)


def declined(admission: Admission, priority_class: PriorityClass, now_s: float) -> Declined:
    found = admission.enter(priority_class, now_s=now_s)
    assert found is not None
    return found


def test_a_place_that_falls_free_is_given_again() -> None:
    admission = full()
    assert admission.enter(INTERACTIVE, now_s=1.0) is not None
    admission.leave(INTERACTIVE, now_s=2.0)
    assert admission.enter(INTERACTIVE, now_s=3.0) is None
    admission.check()


def test_the_wait_is_the_mean_time_between_endings_of_the_class() -> None:
    admission = full(limit=1)
    ended(admission, INTERACTIVE, 0.0, 8.0, 16.0)
    ended(admission, BATCH, 4.0)
    found = declined(admission, INTERACTIVE, 24.0)
    assert (found.obstacle, found.retry_after_s) == (Obstacle.FULL, 8.0)
    assert declined(admission, BATCH, 24.0).retry_after_s == 20.0


def test_a_class_of_which_none_ended_takes_the_pace_of_all() -> None:
    admission = full(limit=1)
    ended(admission, INTERACTIVE, 0.0, 8.0, 16.0)
    assert declined(admission, STANDARD, 24.0).retry_after_s == 8.0


def test_without_endings_of_late_the_wait_is_a_guess() -> None:
    admission = full(limit=1)
    assert declined(admission, INTERACTIVE, 1.0).retry_after_s == MIN_RETRY_S
    ended(admission, INTERACTIVE, 1.0)
    assert declined(admission, INTERACTIVE, 999.0).retry_after_s == MIN_RETRY_S


def test_the_wait_stays_within_what_clients_obey() -> None:
    admission = full(limit=1)
    ended(admission, INTERACTIVE, 0.0)
    wait_s = declined(admission, INTERACTIVE, 60.0).retry_after_s
    assert MIN_RETRY_S <= wait_s <= MAX_RETRY_S == 120.0


def test_while_draining_nobody_enters() -> None:
    admission = Admission(10)
    admission.draining = True
    found = declined(admission, INTERACTIVE, 0.0)
    assert (found.obstacle, found.retry_after_s) == (Obstacle.DRAINING, DRAINING_RETRY_S)


def test_leaving_without_entering_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Admission(1).leave(INTERACTIVE, now_s=0.0)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="admits nobody"):
        Admission(0)


def heard(admission: Admission, waiting: int, gap_s: float, **load: bool | int) -> None:
    queue = ClassQueue(priority_class=STANDARD, waiting=waiting, gap_s=gap_s)
    report = QueueLoad(scheduler=Incarnation("s"), max_queued=100, classes=(queue,), **load)  # type: ignore[arg-type]
    admission.queues.heard(report, now_s=0.0)


@pytest.mark.parametrize(
    ("waiting", "gap_s", "load", "obstacle", "retry_after_s"),
    [
        (59, 1.0, {}, None, 0.0),
        (60, 1.0, {}, Obstacle.TOO_LATE, 61.0),
        (500, 1.0, {}, Obstacle.TOO_LATE, 120.0),
        (30, 1.0, {"queued": 75}, Obstacle.QUEUE_FULL, 31.0),
        (30, 1.0, {"queued": 74}, None, 0.0),
        (3, 0.1, {"storage_full": True}, Obstacle.STORAGE_FULL, 1.0),
    ],
)
def test_what_would_be_served_too_late_is_refused_with_the_time_its_queue_takes(
    waiting: int,
    gap_s: float,
    load: dict[str, bool | int],
    obstacle: Obstacle | None,
    retry_after_s: float,
) -> None:
    admission = Admission(10)
    heard(admission, waiting, gap_s, **load)
    late = obstacle is Obstacle.TOO_LATE
    found = admission.in_time(STANDARD, first_token_s=60.0, now_s=1.0)
    expected = None
    if obstacle is not None:
        expected = Declined(obstacle, retry_after_s, waiting + 1.0 if late else 0.0)
    assert found == expected
    assert admission.in_time(STANDARD, first_token_s=60.0, now_s=2.1) is None, "the report is old"


def test_what_was_not_stored_may_come_back_when_the_queue_as_last_heard_is_through() -> None:
    admission = Admission(10)
    heard(admission, 9, 2.0)
    found = admission.not_stored(STANDARD, Obstacle.BUS_AWAY, now_s=60.0)
    assert found == Declined(Obstacle.BUS_AWAY, 20.0)
    assert admission.not_stored(STANDARD, Obstacle.BUS_AWAY, now_s=121.0).retry_after_s == 1.0

"""How many at once, and when to come back."""

import pytest

from diptych_policy.admission import (
    DRAINING_RETRY_S,
    MAX_RETRY_S,
    UNKNOWN_RETRY_S,
    Admission,
    Obstacle,
)


def full(limit: int = 2) -> Admission:
    admission = Admission(limit)
    for _ in range(limit):
        assert admission.enter(now_s=0.0) is None
    return admission


def test_a_place_that_falls_free_is_given_again() -> None:
    admission = full()
    assert admission.enter(now_s=1.0) is not None
    admission.leave(now_s=2.0)
    assert admission.enter(now_s=3.0) is None
    admission.check()


def test_the_wait_is_the_mean_time_between_endings() -> None:
    admission = full(limit=1)
    for ending in (0.0, 8.0, 16.0):
        admission.leave(now_s=ending)
        admission.enter(now_s=ending)
    declined = admission.enter(now_s=24.0)
    assert declined is not None
    assert declined.obstacle is Obstacle.FULL
    assert declined.retry_after_s == 8.0


def test_without_endings_of_late_the_wait_is_a_guess() -> None:
    admission = full(limit=1)
    assert admission.enter(now_s=1.0).retry_after_s == UNKNOWN_RETRY_S  # type: ignore[union-attr]
    admission.leave(now_s=1.0)
    admission.enter(now_s=1.0)
    assert admission.enter(now_s=999.0).retry_after_s == UNKNOWN_RETRY_S  # type: ignore[union-attr]


def test_the_wait_stays_within_what_clients_obey() -> None:
    admission = full(limit=1)
    admission.leave(now_s=0.0)
    admission.enter(now_s=0.0)
    declined = admission.enter(now_s=60.0)
    assert declined is not None
    assert UNKNOWN_RETRY_S <= declined.retry_after_s <= MAX_RETRY_S


def test_while_draining_nobody_enters() -> None:
    admission = Admission(10)
    admission.draining = True
    declined = admission.enter(now_s=0.0)
    assert declined is not None
    assert declined.obstacle is Obstacle.DRAINING
    assert declined.retry_after_s == DRAINING_RETRY_S


def test_leaving_without_entering_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Admission(1).leave(now_s=0.0)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="admits nobody"):
        Admission(0)

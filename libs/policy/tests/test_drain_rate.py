"""The pace of one class, while somebody of it waits."""

import pytest

from diptych_policy.drain_rate import MAX_GAP_S, RECENT, DrainRate


def paced(gap_s: float, count: int, drain: DrainRate | None = None) -> DrainRate:
    drain = drain or DrainRate()
    now_s = 1000.0
    drain.tick(waiting=True, now_s=now_s)
    for _ in range(count):
        now_s += gap_s
        drain.served(now_s=now_s)
    drain.tick(waiting=False, now_s=now_s)
    return drain


def test_nothing_is_known_before_anybody_waited() -> None:
    drain = DrainRate()
    drain.tick(waiting=False, now_s=0.0)
    drain.tick(waiting=False, now_s=99.0)
    assert drain.gap_s == 0.0


@pytest.mark.parametrize("gap_s", [0.1, 3.0])
def test_the_gap_is_the_mean_time_between_first_tokens(gap_s: float) -> None:
    assert paced(gap_s, 5).gap_s == pytest.approx(gap_s)


def test_time_in_which_nobody_waits_does_not_count() -> None:
    drain = paced(2.0, 3)
    drain.tick(waiting=True, now_s=5000.0)
    drain.served(now_s=5002.0)
    assert drain.gap_s == pytest.approx(2.0)


def test_a_stall_shows_while_it_lasts_and_is_forgotten_by_new_first_tokens() -> None:
    drain = paced(0.5, RECENT)
    drain.tick(waiting=True, now_s=2000.0)
    for now_s, gap_s in ((2002.0, 0.5), (2040.0, 10.0), (2600.0, MAX_GAP_S)):
        drain.tick(waiting=True, now_s=now_s)
        assert drain.gap_s == pytest.approx(gap_s)
    drain.served(now_s=2600.0)
    assert drain.gap_s == pytest.approx((31 * 0.5 + MAX_GAP_S) / RECENT)
    assert paced(0.5, RECENT, drain).gap_s == pytest.approx(0.5)


def test_a_first_wait_says_something_already() -> None:
    drain = DrainRate()
    drain.tick(waiting=True, now_s=0.0)
    drain.tick(waiting=True, now_s=20.0)
    assert drain.gap_s == 5.0

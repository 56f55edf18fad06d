from math import inf, nan

import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.power import PowerSetPoint
from diptych_power.lease import CapLease


def set_point(
    cap_w: float, sequence: int = 1, *, governor: str = "g1", lease_ms: int = 10_000
) -> PowerSetPoint:
    return PowerSetPoint(
        governor=Incarnation(governor),
        worker=Incarnation("w1"),
        sequence=sequence,
        cap_w=cap_w,
        lease_ms=lease_ms,
    )


@pytest.fixture
def lease() -> CapLease:
    return CapLease(default_w=700.0, min_w=200.0)


def test_a_set_point_holds_until_its_lease_ends(lease: CapLease) -> None:
    assert lease.cap_w(0.0) == 700.0

    assert lease.offer(set_point(400.0), 5.0)

    assert lease.cap_w(14.999) == 400.0
    assert lease.cap_w(15.0) == 700.0


@pytest.mark.parametrize(("asked_w", "given_w"), [(50.0, 200.0), (900.0, 700.0), (300.0, 300.0)])
def test_a_cap_stays_between_the_limits(lease: CapLease, asked_w: float, given_w: float) -> None:
    lease.offer(set_point(asked_w), 0.0)

    assert lease.cap_w(1.0) == given_w


@pytest.mark.parametrize("bad", [set_point(nan), set_point(inf), set_point(300.0, lease_ms=0)])
def test_a_malformed_set_point_is_dropped(lease: CapLease, bad: PowerSetPoint) -> None:
    assert not lease.offer(bad, 0.0)
    assert lease.cap_w(0.0) == 700.0


def test_repeated_and_reordered_set_points_do_not_count(lease: CapLease) -> None:
    lease.offer(set_point(400.0, 2), 0.0)

    assert not lease.offer(set_point(400.0, 2), 9.0)
    assert not lease.offer(set_point(300.0, 1), 9.0)

    assert lease.cap_w(9.0) == 400.0
    assert lease.cap_w(10.0) == 700.0


def test_a_thawed_governor_cannot_undo_what_its_successor_ordered(lease: CapLease) -> None:
    lease.offer(set_point(600.0, 50), 0.0)
    assert lease.offer(set_point(300.0, 1, governor="g2"), 1.0)

    assert not lease.offer(set_point(600.0, 51), 2.0)

    assert lease.cap_w(2.0) == 300.0


def test_limits_must_make_sense() -> None:
    with pytest.raises(ValueError, match="lowest cap"):
        CapLease(default_w=100.0, min_w=200.0)

import pytest

from diptych_costs.gpus import H100_SXM
from diptych_costs.power import (
    Work,
    clock_under_cap,
    full_clock_w,
    power_at_clock_w,
    slowdown,
    voltage_frac,
)


@pytest.mark.parametrize(
    ("batch", "watts"), [(0, 300), (1, 300), (8, 486), (16, 523), (256, 691), (9999, 691)]
)
def test_decode_power_follows_the_measured_batches(batch: int, watts: float) -> None:
    assert full_clock_w(H100_SXM, Work.DECODE, batch=batch) == pytest.approx(watts)


def test_prefill_power_does_not_depend_on_the_batch() -> None:
    assert full_clock_w(H100_SXM, Work.PREFILL, batch=1) == 690.0


def test_power_rises_with_the_clock_from_idle_to_full() -> None:
    clocks = [0.2, 0.4, 0.5, 0.6, 0.8, 1.0]
    watts = [power_at_clock_w(H100_SXM, 690.0, clock) for clock in clocks]

    assert watts == sorted(watts)
    assert watts[0] > H100_SXM.idle_w
    assert watts[-1] == pytest.approx(690.0)


def test_the_voltage_is_flat_below_its_knee() -> None:
    assert voltage_frac(H100_SXM, 0.2) == voltage_frac(H100_SXM, 0.5) == 0.685
    assert voltage_frac(H100_SXM, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("cap_w", [200.0, 350.0, 500.0, 689.0])
def test_the_clock_under_a_cap_just_fits(cap_w: float) -> None:
    clock = clock_under_cap(H100_SXM, 690.0, cap_w)

    assert power_at_clock_w(H100_SXM, 690.0, clock) == pytest.approx(cap_w)


def test_a_cap_above_the_need_changes_nothing() -> None:
    """Caps of 280 to 700 W never bound small-batch decode on an H200 (arXiv 2605.11999)."""
    need_w = full_clock_w(H100_SXM, Work.DECODE, batch=1)

    assert clock_under_cap(H100_SXM, need_w, 300.0) == 1.0


def test_a_cap_nobody_can_keep_gives_the_lowest_clock() -> None:
    assert clock_under_cap(H100_SXM, 690.0, 50.0) == H100_SXM.clock_min_frac


def test_half_the_cap_slows_prefill_but_not_decode() -> None:
    """At 350 of 700 W token latency was almost unchanged, prompt latency not (Splitwise)."""
    prefill = clock_under_cap(H100_SXM, 690.0, 350.0)
    decode = clock_under_cap(H100_SXM, full_clock_w(H100_SXM, Work.DECODE, batch=8), 350.0)

    assert slowdown(H100_SXM, Work.PREFILL, prefill) > 1.2
    assert slowdown(H100_SXM, Work.DECODE, decode) == 1.0
    assert slowdown(H100_SXM, Work.DECODE, 0.2) == pytest.approx(2.0)


def test_a_scaled_board_keeps_its_proportions() -> None:
    small = H100_SXM.scaled(350.0)

    assert (small.cap_max_w, small.cap_min_w, small.prefill_w) == (350.0, 100.0, 345.0)
    assert full_clock_w(small, Work.DECODE, batch=8) == pytest.approx(243.0)
    with pytest.raises(ValueError, match="positive"):
        H100_SXM.scaled(0.0)

import pytest

from diptych_testkit.growth import MB, Sample, growth


def run(minutes: int, mb_at: list[float]) -> list[Sample]:
    """A sample every ten seconds at 50 requests/s; `mb_at` repeats its last value."""
    return [
        Sample(at_s=10.0 * n, requests=500 * n, rss_bytes=int(mb_at[min(n, len(mb_at) - 1)] * MB))
        for n in range(6 * minutes + 1)
    ]


def test_a_flat_process_does_not_grow() -> None:
    seen = growth(run(30, [100.0]))
    assert (seen.in_the_end_mb, seen.per_100k_mb, seen.window_s) == (0.0, 0.0, 1200.0)


def test_what_fills_while_it_warms_up_is_no_growth() -> None:
    seen = growth(run(30, [50.0 + n for n in range(50)]))
    assert seen.in_the_end_mb == 0.0
    assert seen.last_mb == 99.0


def test_a_leak_of_100_bytes_a_request_is_seen() -> None:
    leak = [50.0 + 500 * n * 100 / MB for n in range(181)]
    seen = growth(run(30, leak))
    assert seen.per_100k_mb == pytest.approx(100 * 100_000 / MB, rel=0.01)
    # 19 minutes between the middles of the two minutes that are compared
    assert seen.in_the_end_mb == pytest.approx(19 * 60 * 50 * 100 / MB, rel=0.01)


def test_a_short_run_counts_its_last_two_thirds() -> None:
    seen = growth(run(3, [10.0]))
    assert (seen.window_s, seen.requests) == (120.0, 6000)


def test_too_few_samples_say_nothing() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        growth([Sample(0.0, 0, 0)])

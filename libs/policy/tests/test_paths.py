"""Which path a request's KV takes: `paths`' three rules, and a table of what follows from them."""

import pytest

from diptych_contracts.requests import KvPath
from diptych_policy.paths import (
    DISK,
    HOST,
    Crossing,
    ParkingPlace,
    PathChoice,
    choose_path,
    estimate_s,
)

AT_HOME, STRAIGHT, HOST_PATH, DISK_PATH = KvPath
TB = 10**12
KV_BYTES = 8192 * 114_688
"""8,192 tokens of Llama-3.2-3B in f16: 2 x 28 layers x 8 KV heads x 128 x 2 bytes each, 0.94 GB."""
SLOW, MIDDLE, FAST = 3.125e9, 12e9, 50e9
"""25 Gb/s; a PCIe 3.0 x16 bridge, as 100 Gb/s; 400 Gb/s."""
PLACES = {HOST: ParkingPlace(TB, 12e9), DISK: ParkingPlace(TB, 3e9)}
"""Host memory by way of PCIe 3.0, and an NVMe disk."""


def crossing(**changes: object) -> Crossing:
    values: dict[str, object] = {
        "kv_bytes": KV_BYTES,
        "seat_free": False,
        "seat_wait_s": 0.1,
        "link_bytes_per_s": MIDDLE,
        "places": PLACES,
    }
    return Crossing(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("link_bytes_per_s", "expected"),
    [
        (SLOW, {50: "waits", 200: "waits", 450: "waits", 1000: DISK_PATH}),
        (MIDDLE, {50: "waits", 200: "waits", 450: HOST_PATH, 1000: DISK_PATH}),
        (FAST, {50: "waits", 200: HOST_PATH, 450: HOST_PATH, 1000: DISK_PATH}),
    ],
    ids=["25 Gb/s", "100 Gb/s", "400 Gb/s"],
)
def test_while_decode_is_full_the_roomiest_in_time_is_taken(
    link_bytes_per_s: float, expected: dict[int, KvPath | str]
) -> None:
    """A seat falls free in 100 ms. At 50 ms nothing is in time, and waiting is the soonest."""
    found = {}
    for slo_ms in (50, 200, 450, 1000):
        choice = choose_path(crossing(link_bytes_per_s=link_bytes_per_s, ttft_slo_s=slo_ms / 1000))
        found[slo_ms] = "waits" if choice.waits else choice.path
    assert found == expected


@pytest.mark.parametrize(
    ("link_bytes_per_s", "expected"),
    [
        (SLOW, {50: AT_HOME, 200: AT_HOME, 450: STRAIGHT, 1000: STRAIGHT}),
        (MIDDLE, {50: AT_HOME, 200: STRAIGHT, 450: STRAIGHT, 1000: STRAIGHT}),
        (FAST, {50: STRAIGHT, 200: STRAIGHT, 450: STRAIGHT, 1000: STRAIGHT}),
    ],
    ids=["25 Gb/s", "100 Gb/s", "400 Gb/s"],
)
def test_with_a_seat_free_kv_goes_straight_or_stays_at_home(
    link_bytes_per_s: float, expected: dict[int, KvPath]
) -> None:
    found = {}
    for slo_ms in (50, 200, 450, 1000):
        choice = choose_path(
            crossing(seat_free=True, link_bytes_per_s=link_bytes_per_s, ttft_slo_s=slo_ms / 1000)
        )
        assert not choice.waits
        found[slo_ms] = choice.path
    assert found == expected


def test_estimates_follow_the_page() -> None:
    known = crossing(seat_wait_s=2.0, prefill_s=0.5)
    link_s, host_s, disk_s = KV_BYTES / 12e9, KV_BYTES / 12e9, KV_BYTES / 3e9
    assert estimate_s(AT_HOME, known) == 2.5
    assert estimate_s(STRAIGHT, known) == pytest.approx(2.5 + link_s)
    assert estimate_s(HOST_PATH, known) == pytest.approx(2.0 + host_s)
    assert estimate_s(DISK_PATH, known) == pytest.approx(2.0 + disk_s)
    soon = crossing(seat_wait_s=0.0, prefill_s=0.5)
    assert estimate_s(HOST_PATH, soon) == pytest.approx(0.5 + link_s + 2 * host_s)


def test_without_an_slo_what_prefill_does_meanwhile_decides() -> None:
    assert choose_path(crossing(prefill_s=1.0, seat_wait_s=2.0)).path is HOST_PATH
    waits = choose_path(crossing(prefill_s=0.0, seat_wait_s=0.01))
    assert (waits.path, waits.waits) == (STRAIGHT, True)
    assert choose_path(crossing(seat_wait_s=None)).path is HOST_PATH


def test_what_nobody_has_measured_holds_up_nothing() -> None:
    unmeasured = {HOST: ParkingPlace(TB), DISK: ParkingPlace(TB)}
    straight = crossing(seat_free=True, link_bytes_per_s=0.0, ttft_slo_s=0.001)
    assert choose_path(straight).path is STRAIGHT
    assert choose_path(crossing(seat_wait_s=None, places=unmeasured)).path is HOST_PATH


def test_a_place_that_is_full_or_not_there_is_a_miss() -> None:
    small = {HOST: ParkingPlace(KV_BYTES - 1, 12e9), DISK: ParkingPlace(TB, 3e9)}
    assert choose_path(crossing(seat_wait_s=None, places=small)).path is DISK_PATH
    nowhere = choose_path(crossing(places={}))
    assert nowhere == PathChoice(STRAIGHT, "no seat is free and nowhere to park", waits=True)

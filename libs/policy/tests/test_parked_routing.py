"""Which decode worker parks a request's KV, by which path, and how that is booked."""

from typing import Any

import msgspec
import pytest

from diptych_contracts.fleet import ParkingRoom, Role, WorkerRegistration
from diptych_contracts.requests import Assignment, Forced, KvPath, Mode
from diptych_policy.fleet import Fleet
from diptych_policy.routing import Company, Demand, Unplaced, choose
from diptych_testkit.builders import MODEL, a_load, a_worker

P1 = a_worker("p1", Role.PREFILL)
MANY = 10**9


def rooms(**free: int) -> tuple[ParkingRoom, ...]:
    return tuple(ParkingRoom(kind=kind, total_bytes=n) for kind, n in free.items())


def a_decode(name: str, **free: int) -> WorkerRegistration:
    return msgspec.structs.replace(a_worker(name), parking=rooms(**free))


def a_fleet(*offers: WorkerRegistration, full: tuple[str, ...] = ()) -> Fleet:
    fleet = Fleet()
    for offer in offers:
        fleet.register(offer)
        fleet.found(offer.worker)
        if offer.worker in full:
            load = a_load(offer.worker, running=offer.max_sequences, parking=offer.parking)
            fleet.report(load)
    return fleet


def placed(fleet: Fleet, **changes: Any) -> Assignment:
    values: dict[str, Any] = {"model": MODEL, "prompt_tokens": 10, "answer_tokens": 10}
    found = choose(Demand(**(values | changes)), fleet)
    assert isinstance(found, Assignment), found
    return found


def unplaced(fleet: Fleet, **changes: Any) -> str:
    values: dict[str, Any] = {"model": MODEL, "prompt_tokens": 10, "answer_tokens": 10}
    found = choose(Demand(**(values | changes)), fleet)
    assert isinstance(found, Unplaced), found
    return found.reason


def test_while_a_seat_is_free_nothing_parks() -> None:
    found = placed(a_fleet(P1, a_decode("d1", host=MANY)))
    assert (found.path, found.path_reason) == (KvPath.DIS_GPU, "a seat is free")


def test_while_all_are_full_the_one_that_can_park_is_given_work() -> None:
    fleet = a_fleet(P1, a_decode("d1"), a_decode("d2", host=MANY), full=("d1", "d2"))
    found = placed(fleet)
    assert (found.decode, found.prefill) == ("d2", "p1")
    assert (found.path, found.mode) == (KvPath.DIS_CPU, Mode.REMOTE)
    assert found.path_reason.startswith("no seat is free")


def test_the_last_seat_goes_before_any_parking() -> None:
    fleet = a_fleet(P1, a_decode("d1"), a_decode("d2", host=MANY), full=("d2",))
    assert placed(fleet).path is KvPath.DIS_GPU


def test_nothing_parks_where_it_would_not_fit() -> None:
    full = a_fleet(P1, a_decode("d1", host=10), full=("d1",))
    assert unplaced(full) == "every decode worker is full"
    offer = a_decode("d1", host=MANY)
    assert unplaced(a_fleet(P1, offer, full=("d1",)), answer_tokens=offer.kv_tokens)
    away = a_fleet(P1, offer, full=("d1",))
    away.report(a_load("d1", running=offer.max_sequences, parking=rooms(host=0)))
    assert unplaced(away)


def test_a_suspect_and_what_was_refused_do_not_park() -> None:
    fleet = a_fleet(P1, offer := a_decode("d1", host=MANY), full=("d1",))
    assert unplaced(fleet, company=Company.PROVEN)
    assert unplaced(fleet, excluded=frozenset({offer.worker}))


def test_what_was_given_to_park_counts_until_it_has_a_seat() -> None:
    offer = a_decode("d1", disk=MANY)
    fleet = a_fleet(P1, offer, full=("d1",))
    n_bytes = fleet.kv_bytes(offer.worker, 10)
    fleet.park(offer.worker, "disk", MANY - n_bytes)
    assert placed(fleet).path is KvPath.DIS_DISK
    fleet.park(offer.worker, "disk", 1)
    assert unplaced(fleet)
    fleet.park(offer.worker, "disk", -MANY)
    assert placed(fleet).path is KvPath.DIS_DISK


@pytest.mark.parametrize("path", [KvPath.DIS_CPU, KvPath.DIS_DISK])
def test_a_forced_tier_is_taken_with_a_seat_free_too(path: KvPath) -> None:
    fleet = a_fleet(P1, a_decode("d1", host=MANY, disk=MANY), a_decode("d2"))
    for demand in ({"deployment": path}, {"forced": Forced(path=path)}):
        found = placed(fleet, **demand)
        assert (found.decode, found.path) == ("d1", path)


def test_a_forced_tier_that_has_no_room_is_a_miss() -> None:
    fleet = a_fleet(P1, a_decode("d1", host=MANY))
    found = placed(fleet, deployment=KvPath.DIS_DISK)
    assert found.path is KvPath.DIS_GPU
    assert found.path_reason == "nobody has room on disk to park it"
    full = a_fleet(P1, a_decode("d1", host=MANY), full=("d1",))
    assert unplaced(full, deployment=KvPath.DIS_DISK)


def test_straight_and_colocated_are_forced_too() -> None:
    fleet = a_fleet(P1, a_decode("d1", host=MANY))
    assert placed(fleet, deployment=KvPath.COLOCATED).mode is Mode.LOCAL
    assert placed(fleet, deployment=KvPath.DIS_GPU).path is KvPath.DIS_GPU
    full = a_fleet(P1, a_decode("d1", host=MANY), full=("d1",))
    assert unplaced(full, deployment=KvPath.DIS_GPU)
    assert unplaced(a_fleet(a_decode("d1")), deployment=KvPath.DIS_GPU)


def test_what_a_request_says_goes_before_the_setting() -> None:
    fleet = a_fleet(P1, a_decode("d1", host=MANY))
    local = placed(fleet, forced=Forced(mode=Mode.LOCAL), deployment=KvPath.DIS_CPU)
    assert local.path is KvPath.COLOCATED
    remote = placed(fleet, forced=Forced(mode=Mode.REMOTE), deployment=KvPath.COLOCATED)
    assert remote.path is KvPath.DIS_GPU
    both = placed(fleet, forced=Forced(path=KvPath.DIS_GPU), deployment=KvPath.DIS_CPU)
    assert both.path is KvPath.DIS_GPU


def test_kv_that_would_be_late_stays_at_home() -> None:
    fleet = a_fleet(P1, offer := a_decode("d1"))
    fleet.report(a_load("p1", kv_bytes_per_s=fleet.kv_bytes(offer.worker, 10) / 2))
    found = placed(fleet, ttft_slo_s=1.0)
    assert (found.mode, found.path) == (Mode.LOCAL, KvPath.COLOCATED)
    assert placed(fleet, ttft_slo_s=3.0).path is KvPath.DIS_GPU
    assert placed(fleet).path is KvPath.DIS_GPU


def test_what_parks_is_in_time_by_what_was_measured() -> None:
    offer = a_decode("d1", host=MANY, disk=MANY)
    fleet = a_fleet(P1, offer, full=("d1",))
    measured = (
        ParkingRoom(kind="host", total_bytes=MANY, bytes_per_s=1e9),
        ParkingRoom(kind="disk", total_bytes=MANY, bytes_per_s=1e4),
    )
    full = a_load("d1", running=offer.max_sequences, parking=measured, seat_gap_s=0.5, parked=1)
    fleet.report(full)
    assert placed(fleet, ttft_slo_s=60.0).path is KvPath.DIS_DISK
    assert placed(fleet, ttft_slo_s=1.2, prompt_tokens=400).path is KvPath.DIS_CPU

from typing import Literal

import msgspec
import pytest

from diptych_contracts.blocks import BlocksChanged
from diptych_contracts.cards import Fingerprint
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import Assignment, Forced, Mode, PriorityClass
from diptych_contracts.transfers import MAX_TRANSFER_BLOCKS
from diptych_policy.fleet import Fleet
from diptych_policy.ordering import order_key
from diptych_policy.prefixes import PromptBlocks
from diptych_policy.routing import (
    Demand,
    Unplaced,
    choose,
    differing_fields,
    links_between,
    strangers,
)
from diptych_testkit.builders import MODEL, a_load, a_worker


def a_fleet(*registrations: WorkerRegistration) -> Fleet:
    fleet = Fleet()
    for registration in registrations:
        fleet.register(registration)
        fleet.found(registration.worker)
    return fleet


def demand(**changes: object) -> Demand:
    values: dict[str, object] = {"model": MODEL, "prompt_tokens": 10, "answer_tokens": 10}
    return Demand(**(values | changes))  # type: ignore[arg-type]


def placed_by(wanted: Demand, fleet: Fleet) -> Assignment | Unplaced:
    """Who was chosen; by which path is `test_parked_routing`'s."""
    placed = choose(wanted, fleet)
    if isinstance(placed, Unplaced):
        return placed
    return msgspec.structs.replace(placed, path=None, path_reason="")


P1, P2 = a_worker("p1", Role.PREFILL), a_worker("p2", Role.PREFILL)
D1, D2 = a_worker("d1"), a_worker("d2")


def test_a_pair_serves_remotely() -> None:
    placed = placed_by(demand(), a_fleet(P1, D1))
    assert placed == Assignment(mode=Mode.REMOTE, prefill=P1.worker, decode=D1.worker, link="shm")


@pytest.mark.parametrize("alone", [P1, D1])
def test_the_last_worker_serves_alone(alone: WorkerRegistration) -> None:
    placed = placed_by(demand(), a_fleet(alone))
    assert placed == Assignment(mode=Mode.LOCAL, decode=alone.worker)


def test_nobody_serves_an_unknown_model() -> None:
    assert choose(demand(model="other"), a_fleet(P1, D1)) == Unplaced(
        "no worker serves 'other' at the moment"
    )


def test_a_forced_mode_is_kept() -> None:
    fleet = a_fleet(P1, D1)
    local = placed_by(demand(forced=Forced(mode=Mode.LOCAL)), fleet)
    assert local == Assignment(mode=Mode.LOCAL, decode=D1.worker)
    alone = choose(demand(forced=Forced(mode=Mode.REMOTE)), a_fleet(D1))
    assert isinstance(alone, Unplaced)


def test_workers_that_cannot_share_kv_are_not_paired() -> None:
    other_model = msgspec.structs.replace(P1, fingerprint=Fingerprint(base="x", weights="y"))
    other_host = msgspec.structs.replace(P1, host="host-2")
    for prefill in (other_model, other_host):
        placed = placed_by(demand(), a_fleet(prefill, D1))
        assert placed == Assignment(mode=Mode.LOCAL, decode=D1.worker)


def test_workers_that_cannot_share_kv_are_told_in_what_they_differ() -> None:
    layout = msgspec.structs.replace(P1.layout, block_tokens=16, tp=2)
    split = msgspec.structs.replace(P1, layout=layout)
    expected = [
        f"layout.block_tokens (16, {D1.layout.block_tokens})",
        "layout.tp (2, 1)",
    ]
    assert differing_fields(split, D1) == expected
    assert differing_fields(P1, D1) == []
    assert strangers(split, a_fleet(D1, P2)) == {D1.worker: expected}
    assert strangers(P1, a_fleet(D1)) == {}
    placed = choose(demand(forced=Forced(mode=Mode.REMOTE)), a_fleet(split, D1))
    assert isinstance(placed, Unplaced)
    assert placed.reason.endswith(f"their KV differs in {', '.join(expected)}")


def over(worker: WorkerRegistration, *kinds: str, host: str = "host-1") -> WorkerRegistration:
    """`worker` on `host`, offering links of `kinds`; its tcp is open to every host."""
    (shm,) = worker.endpoints
    hosts = {"shm": host, "nixl": host, "tcp": "", "loopback": host}
    endpoints = tuple(
        msgspec.structs.replace(shm, kind=kind.replace("loopback", "tcp"), host=hosts[kind])
        for kind in kinds
    )
    return msgspec.structs.replace(worker, endpoints=endpoints, host=host)


def test_the_fastest_link_that_reaches_and_both_speak_is_taken() -> None:
    p1, d1 = over(P1, "shm", "tcp"), over(D1, "shm", "tcp")
    afar = over(P1, "shm", "tcp", host="host-2")
    assert links_between(p1, d1) == ["shm", "tcp"]
    assert links_between(afar, d1) == ["tcp"]
    assert links_between(p1, over(D1, "tcp", "shm")) == ["tcp", "shm"]
    assert links_between(over(P1, "tcp"), d1) == ["tcp"]
    assert links_between(over(P1, "shm"), over(D1, "tcp")) == []


def test_a_listener_on_loopback_is_not_reached_from_another_host() -> None:
    d1 = over(D1, "shm", "loopback")
    assert links_between(over(P1, "tcp"), d1) == ["tcp"]
    assert links_between(over(P1, "tcp", host="host-2"), d1) == []


def test_an_assignment_names_the_link_to_fall_back_to() -> None:
    fleet = a_fleet(over(P1, "shm", "tcp"), over(D1, "shm", "tcp"))
    placed = choose(demand(), fleet)
    assert isinstance(placed, Assignment)
    assert (placed.link, placed.next_link, placed.last_link) == ("shm", "tcp", None)
    three = ("shm", "nixl", "tcp")
    placed = choose(demand(), a_fleet(over(P1, *three), over(D1, *three)))
    assert isinstance(placed, Assignment)
    assert (placed.link, placed.next_link, placed.last_link) == three


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_forced_link_is_taken_and_nothing_else(link: Literal["shm", "tcp"]) -> None:
    fleet = a_fleet(over(P1, "shm", "tcp"), over(D1, "shm", "tcp"))
    placed = choose(demand(forced=Forced(link=link)), fleet)
    assert isinstance(placed, Assignment)
    assert (placed.link, placed.next_link) == (link, None)
    forced = Forced(mode=Mode.REMOTE, link="tcp")
    assert isinstance(choose(demand(forced=forced), a_fleet(P1, D1)), Unplaced)


def test_the_least_loaded_is_chosen_and_ties_rotate() -> None:
    fleet = a_fleet(P1, P2, D1, D2)
    fleet.report(a_load("d1", running=2))
    first = choose(demand(), fleet)
    assert isinstance(first, Assignment)
    assert first.decode == D2.worker
    for worker in first.workers:
        fleet.assign(worker, 20)
    second = choose(demand(), fleet)
    assert isinstance(second, Assignment)
    assert second.prefill != first.prefill


def test_full_draining_dead_and_excluded_workers_are_left_out() -> None:
    fleet = a_fleet(D1, D2)
    fleet.report(a_load("d1", running=4))
    assert placed_by(demand(), fleet) == Assignment(mode=Mode.LOCAL, decode=D2.worker)
    excluded = frozenset({D2.worker})
    assert choose(demand(excluded=excluded), fleet) == Unplaced("every worker is full")
    fleet.report(a_load("d2", draining=True))
    assert choose(demand(), fleet) == Unplaced("every worker is full")
    fleet.report(a_load("d2"))
    fleet.lost(D2.worker)
    assert choose(demand(), fleet) == Unplaced("every worker is full")
    fleet.unregister(D1.worker)
    assert isinstance(choose(demand(), fleet), Unplaced)


def test_a_sequence_must_fit_the_kv_cells() -> None:
    fleet = a_fleet(D1)
    fleet.assign(D1.worker, 1010)
    assert choose(demand(), fleet) == Unplaced("every worker is full")
    fleet.unassign(D1.worker, 1010)
    assert isinstance(choose(demand(), fleet), Assignment)


def test_a_full_prefill_worker_makes_a_pair_wait() -> None:
    fleet = a_fleet(P1, D1)
    fleet.report(a_load("p1", waiting=4))
    assert choose(demand(), fleet) == Unplaced("every prefill worker is full")
    fleet.report(a_load("p1"))
    fleet.report(a_load("d1", running=4))
    assert choose(demand(), fleet) == Unplaced("every decode worker is full")


def test_reports_and_bookings_of_unknown_workers_are_ignored() -> None:
    fleet = a_fleet(D1)
    unknown = Incarnation("x")
    fleet.report(a_load("x"))
    fleet.assign(unknown, 1)
    fleet.unassign(unknown, 1)
    fleet.register(D1)
    assert [worker.id for worker in fleet.usable(MODEL, Role.DECODE)] == [D1.worker]


def test_classes_are_served_in_order_and_each_first_come_first_served() -> None:
    keys = [
        order_key(PriorityClass.BATCH, 1),
        order_key(PriorityClass.INTERACTIVE, 3),
        order_key(PriorityClass.STANDARD, 2),
        order_key(PriorityClass.INTERACTIVE, 2),
    ]
    assert sorted(keys) == [keys[3], keys[1], keys[2], keys[0]]


LONG = tuple(range(300))


def has_cached(fleet: Fleet, worker: WorkerRegistration, n_tokens: int, tenant: str = "t") -> None:
    prompt = PromptBlocks(tenant, LONG[:n_tokens])
    stored = prompt.hashes(worker.fingerprint.base, worker.layout.block_tokens)
    fleet.blocks.changed(BlocksChanged(worker=worker.worker, event_id=1, stored=stored))


def prefill_of(fleet: Fleet, tenant: str = "t") -> Incarnation:
    prompt = PromptBlocks(tenant, LONG)
    placed = choose(demand(prompt_tokens=len(LONG), prompt=prompt), fleet)
    assert isinstance(placed, Assignment)
    assert placed.prefill is not None
    return placed.prefill


@pytest.mark.parametrize(("warm", "cold"), [(P1, P2), (P2, P1)])
def test_the_longest_overlap_attracts(warm: WorkerRegistration, cold: WorkerRegistration) -> None:
    fleet = a_fleet(P1, P2, D1)
    has_cached(fleet, cold, 64)
    has_cached(fleet, warm, 192)
    assert prefill_of(fleet) == warm.worker


def test_a_queue_longer_than_the_overlap_saves_turns_it_away() -> None:
    fleet = a_fleet(P1, P2, D1)
    has_cached(fleet, P2, 256)
    fleet.report(a_load("p2", waiting_tokens=255))
    assert prefill_of(fleet) == P2.worker
    fleet.report(a_load("p2", waiting_tokens=257))
    assert prefill_of(fleet) == P1.worker


def test_a_hot_prefix_spreads_when_its_worker_is_busy() -> None:
    fleet = a_fleet(P1, P2, D1)
    has_cached(fleet, P1, 256)
    chosen = []
    for _ in range(14):
        worker = prefill_of(fleet)
        chosen.append(worker)
        prompt = PromptBlocks("t", LONG)
        to_compute = fleet.prefill_tokens(worker, prompt, len(LONG))
        fleet.assign(worker, 0, prefill_tokens=to_compute)
        fleet.unassign(worker, 0)
    assert chosen[:6] == [P1.worker] * 6
    assert P2.worker in chosen
    assert chosen.count(P1.worker) > chosen.count(P2.worker)


def test_another_tenants_overlap_counts_for_nothing() -> None:
    fleet = a_fleet(P1, P2, D1)
    has_cached(fleet, P1, 256, tenant="other")
    fleet.report(a_load("p1", waiting_tokens=1))
    assert prefill_of(fleet) == P2.worker


def test_a_worker_that_is_gone_is_forgotten() -> None:
    fleet = a_fleet(P1, P2, D1)
    has_cached(fleet, P1, 256)
    prompt = PromptBlocks("t", LONG)
    assert fleet.prefill_tokens(P1.worker, prompt, 300) == 44
    assert fleet.prefill_tokens(P2.worker, prompt, 300) == 300
    fleet.unregister(P1.worker)
    assert P1.worker not in fleet.blocks
    assert fleet.prefill_tokens(P1.worker, prompt, 300) == 300


def test_prefill_work_that_was_given_counts_until_it_is_done() -> None:
    fleet = a_fleet(P1, P2, D1)
    fleet.assign(P1.worker, 50, prefill_tokens=10)
    (busy, idle) = fleet.usable(MODEL, Role.PREFILL)
    assert (busy.prefill_backlog_tokens, idle.prefill_backlog_tokens) == (10, 0)
    fleet.unassign(P1.worker, 50, prefill_tokens=10)
    assert (busy.prefill_backlog_tokens, busy.assigned_tokens) == (0, 0)


def with_slots(worker: WorkerRegistration, **slots: int) -> WorkerRegistration:
    (template,) = P1.endpoints
    endpoints = tuple(
        msgspec.structs.replace(template, kind=kind, slots=count) for kind, count in slots.items()
    )
    return msgspec.structs.replace(worker, endpoints=endpoints, kv_tokens=10**7)


def test_what_does_not_fit_into_the_transfer_slots_is_not_handed_over() -> None:
    fleet = a_fleet(with_slots(P1, shm=1), with_slots(D1, shm=8))
    assert isinstance(fits := choose(demand(prompt_tokens=8 * 64), fleet), Assignment)
    assert fits.mode is Mode.REMOTE
    too_long = demand(prompt_tokens=8 * 64 + 1)
    assert placed_by(too_long, fleet) == Assignment(mode=Mode.LOCAL, decode=D1.worker)
    forced = choose(demand(prompt_tokens=513, forced=Forced(mode=Mode.REMOTE)), fleet)
    assert forced == Unplaced("no prefill worker can hand the KV of 513 tokens to a decode worker")


def test_a_longer_prompt_goes_to_the_decode_worker_with_the_slots_for_it() -> None:
    fleet = a_fleet(with_slots(P1, shm=1), with_slots(D1, shm=8), with_slots(D2, shm=16))
    placed = choose(demand(prompt_tokens=1000), fleet)
    assert isinstance(placed, Assignment)
    assert placed.decode == D2.worker


def test_no_transfer_has_more_blocks_than_its_messages_can_name() -> None:
    fleet = a_fleet(with_slots(P1, shm=1), with_slots(D1, shm=10**6))
    most = MAX_TRANSFER_BLOCKS * 64
    assert isinstance(fits := choose(demand(prompt_tokens=most), fleet), Assignment)
    assert isinstance(too_long := choose(demand(prompt_tokens=most + 1), fleet), Assignment)
    assert (fits.mode, too_long.mode) == (Mode.REMOTE, Mode.LOCAL)

import random

import pytest

from diptych_contracts.fleet import Role, WorkerLoad
from diptych_contracts.ids import Incarnation
from diptych_policy.power import (
    BudgetChanged,
    LoadSeen,
    PowerEvent,
    PowerGovernor,
    SetCap,
    Ticked,
    WorkerLost,
    WorkerSeen,
)

LEASE_S = 9.0


class Fleet:
    """Workers whose devices obey, and report, as fast as a test lets them."""

    def __init__(self, budget_w: float | None, **roles: Role) -> None:
        self.governor = PowerGovernor(budget_w=budget_w, lease_s=LEASE_S)
        self.caps_w = dict.fromkeys(map(Incarnation, roles), 700.0)
        self.busy: set[str] = set()
        self.now_s = 0.0
        for name, role in roles.items():
            self.send(WorkerSeen(Incarnation(name), role, cap_min_w=200.0, cap_default_w=700.0))

    def send(self, event: PowerEvent) -> dict[str, float]:
        effects = self.governor.handle(event, now_s=self.now_s)
        self.governor.check()
        assert all(isinstance(effect, SetCap) for effect in effects)
        return {effect.worker: effect.cap_w for effect in effects}

    def report(self) -> None:
        for worker, cap_w in self.caps_w.items():
            running = int(worker in self.busy)
            self.send(LoadSeen(WorkerLoad(worker=worker, running=running, cap_w=cap_w)))

    def tick(self, seconds: float = 1.0) -> dict[str, float]:
        self.now_s += seconds
        self.report()
        orders = self.send(Ticked())
        self.caps_w |= {w: cap for w, cap in orders.items() if w in self.caps_w}
        return orders

    def settle(self, ticks: int = 10) -> dict[str, float]:
        for _ in range(ticks):
            self.tick()
        return dict(self.caps_w)


def test_without_a_budget_everybody_gets_the_default() -> None:
    fleet = Fleet(None, p1=Role.PREFILL, d1=Role.DECODE)

    assert fleet.tick() == {"p1": 700.0, "d1": 700.0}


def test_a_set_point_is_repeated_well_before_its_lease_ends() -> None:
    fleet = Fleet(None, p1=Role.PREFILL)
    sent_s = [fleet.now_s for _ in range(12) if fleet.tick()]

    assert sent_s == [1.0, 4.0, 7.0, 10.0]


def test_a_cap_that_is_not_in_force_is_sent_again() -> None:
    fleet = Fleet(400.0, p1=Role.PREFILL)
    assert fleet.tick() == {"p1": 400.0}
    fleet.caps_w[Incarnation("p1")] = 700.0

    assert fleet.tick() == {"p1": 400.0}


def test_watts_go_where_they_are_needed() -> None:
    fleet = Fleet(1000.0, p1=Role.PREFILL, d1=Role.DECODE, d2=Role.DECODE)
    fleet.busy = {"p1", "d1"}

    assert fleet.settle() == {"p1": 450.0, "d1": 325.0, "d2": 225.0}


def test_a_rise_waits_until_the_watts_are_free() -> None:
    fleet = Fleet(900.0, p1=Role.PREFILL, p2=Role.PREFILL)
    assert fleet.settle() == {"p1": 450.0, "p2": 450.0}
    fleet.busy = {"p1"}

    first = fleet.tick()
    second = fleet.tick()

    assert first == {"p2": 245.0}
    assert second == {"p1": 650.0}


def test_nobody_is_raised_by_watts_a_device_still_draws() -> None:
    fleet = Fleet(900.0, p1=Role.PREFILL, p2=Role.PREFILL)
    fleet.settle()
    fleet.busy = {"p1"}
    fleet.tick()

    for _ in range(3):
        fleet.caps_w[Incarnation("p2")] = 450.0
        assert fleet.tick().get("p1", 450.0) == 450.0


def test_a_worker_stays_busy_for_a_while() -> None:
    fleet = Fleet(900.0, p1=Role.PREFILL, p2=Role.PREFILL)
    fleet.busy = {"p1"}
    before = fleet.settle()

    fleet.busy = set()
    assert fleet.settle(ticks=3) == before
    assert fleet.settle() == {"p1": 450.0, "p2": 450.0}


def test_small_rises_wait_and_small_cuts_do_not() -> None:
    fleet = Fleet(500.0, p1=Role.PREFILL)
    fleet.settle()

    assert fleet.send(BudgetChanged(505.0)) == {}
    assert fleet.send(BudgetChanged(495.0)) == {"p1": 495.0}
    assert fleet.settle() == {"p1": 495.0}
    assert fleet.send(BudgetChanged(506.0)) == {"p1": 505.0}


def test_a_budget_below_the_floors_is_told() -> None:
    fleet = Fleet(300.0, p1=Role.PREFILL, d1=Role.DECODE)

    assert fleet.settle() == {"p1": 200.0, "d1": 200.0}
    assert fleet.governor.unmet_w == 100.0


def test_a_lost_workers_watts_are_free_only_when_its_lease_is_over() -> None:
    fleet = Fleet(900.0, p1=Role.PREFILL, p2=Role.PREFILL)
    fleet.settle(ticks=2)
    del fleet.caps_w[Incarnation("p2")]
    fleet.send(WorkerLost(Incarnation("p2")))

    assert fleet.settle(ticks=7) == {"p1": 450.0}
    assert fleet.settle(ticks=3) == {"p1": 700.0}


def test_a_silent_worker_is_lost_and_can_come_back() -> None:
    fleet = Fleet(900.0, p1=Role.PREFILL, p2=Role.PREFILL)
    fleet.settle(ticks=2)
    silent = fleet.caps_w.pop(Incarnation("p2"))
    fleet.settle(ticks=3)

    assert "p2" not in {worker for _ in range(4) for worker in fleet.tick()}

    fleet.caps_w[Incarnation("p2")] = silent
    assert fleet.tick()["p2"] == 450.0


def test_a_device_that_cannot_be_capped_is_left_alone() -> None:
    fleet = Fleet(None)
    fleet.send(WorkerSeen(Incarnation("x"), Role.DECODE, cap_min_w=0.0, cap_default_w=0.0))
    fleet.send(LoadSeen(WorkerLoad(worker=Incarnation("x"))))
    fleet.send(WorkerLost(Incarnation("y")))

    assert fleet.tick() == {}


def test_the_log_is_bounded() -> None:
    fleet = Fleet(None, p1=Role.PREFILL)
    for _ in range(200):
        fleet.tick()

    assert len(fleet.governor.log) == 256


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_holds_whatever_happens(seed: int) -> None:
    """Caps in force never sum to more than the budget, once every device has obeyed once."""
    rng = random.Random(seed)
    roles = {f"w{n}": rng.choice([Role.PREFILL, Role.DECODE]) for n in range(5)}
    fleet = Fleet(2000.0, **roles)
    fleet.settle(ticks=2)

    for _ in range(100):
        fleet.busy = {name for name in roles if rng.random() < 0.4}
        fleet.now_s += 1.0
        fleet.report()
        for worker, cap_w in fleet.send(Ticked()).items():
            if rng.random() < 0.7:
                fleet.caps_w[Incarnation(worker)] = cap_w
        assert sum(fleet.caps_w.values()) <= 2000.0

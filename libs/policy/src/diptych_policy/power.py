"""How many watts each worker's device may draw.

Rules of this first policy:

1. Without a budget every device gets its default cap.
2. With one, each gets its lowest cap, and the rest is shared by need, nobody above its default: a
   busy prefill worker counts 1, a busy decode worker 0.5, an idle one 0.1. Prefill is limited by
   power (dense products draw 690 of an H200's 700 W), decode hardly (137 to 300 W in small
   batches), so a watt serves prefill better.
3. A cap is raised only by watts that are free *now*: a device counts with the higher of what it was
   sent and what it reports, and a lost one with what it was sent until that lease is over. So the
   budget holds while set-points are on their way.
4. Hysteresis: a worker stays busy for 5 s, caps move in steps of 5 W, and rises below 10 W wait.
   Cuts never wait.
5. A set-point is repeated after a third of its lease, and at once if a device reports another cap.

If the lowest caps alone exceed the budget, every device gets its lowest, and `unmet_w` tells.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import assert_never

from diptych_contracts.fleet import Role, WorkerLoad
from diptych_contracts.ids import Incarnation

STEP_W = 5.0
LEAST_RISE_W = 10.0
BUSY_FOR_S = 5.0
SILENT_S = 3.0
"""A worker that reports every 0.1 s and was silent for so long is lost."""
ANSWER_S = 1.0
"""How long a device may take to report a new cap before it is sent again."""

_NEED = {Role.PREFILL: 1.0, Role.DECODE: 0.5}
_IDLE_NEED = 0.1


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker with a device that can be capped has registered."""

    worker: Incarnation
    role: Role
    cap_min_w: float
    cap_default_w: float


@dataclass(frozen=True, slots=True)
class LoadSeen:
    """A worker has reported."""

    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's registration is gone."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """The fleet's budget is another one; None is none."""

    budget_w: float | None


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


PowerEvent = WorkerSeen | LoadSeen | WorkerLost | BudgetChanged | Ticked


@dataclass(frozen=True, slots=True)
class SetCap:
    """Send this set-point, leased."""

    worker: Incarnation
    cap_w: float


@dataclass(slots=True)
class _Device:
    role: Role
    cap_min_w: float
    cap_default_w: float
    seen_s: float
    reported_w: float
    busy_until_s: float = -inf
    sent_w: float | None = None
    sent_s: float = -inf
    lost: bool = False

    @property
    def held_w(self) -> float:
        """What it may be drawing, as far as anyone can tell."""
        return max(self.reported_w, self.sent_w or 0.0)

    def need(self, now_s: float) -> float:
        return _NEED[self.role] if now_s < self.busy_until_s else _IDLE_NEED


class PowerGovernor:
    """Splits a fleet's power budget among its workers.

    Args:
        budget_w: For all devices together; None for no budget.
        lease_s: How long a set-point holds.
    """

    def __init__(self, *, budget_w: float | None, lease_s: float) -> None:
        self._budget_w = budget_w
        self._lease_s = lease_s
        self._devices: dict[Incarnation, _Device] = {}
        self.log: deque[tuple[float, PowerEvent]] = deque(maxlen=256)

    @property
    def unmet_w(self) -> float:
        """By how much the lowest caps exceed the budget; 0 if they fit."""
        floors_w = sum(device.cap_min_w for device in self._devices.values())
        return max(0.0, floors_w - self._limit_w)

    def handle(self, event: PowerEvent, *, now_s: float) -> list[SetCap]:
        """Take `event` in; gives the set-points to send now."""
        self.log.append((now_s, event))
        match event:
            case WorkerSeen():
                self._see(event, now_s)
            case LoadSeen():
                self._note(event.load, now_s)
            case WorkerLost():
                self._lose(event.worker)
            case BudgetChanged():
                self._budget_w = event.budget_w
                return self._plan(now_s)
            case Ticked():
                return self._plan(now_s)
            case _:
                assert_never(event)
        return []

    def check(self) -> None:
        """Raise `AssertionError` if what was ordered breaks a rule."""
        sent_w = [device.sent_w for device in self._devices.values() if device.sent_w is not None]
        for device in self._devices.values():
            cap_w = device.cap_default_w if device.sent_w is None else device.sent_w
            assert device.cap_min_w <= cap_w <= device.cap_default_w, device
        if not self.unmet_w:
            assert sum(sent_w) <= self._limit_w + 1e-6, f"{sent_w} exceed {self._limit_w} W"

    @property
    def _limit_w(self) -> float:
        return inf if self._budget_w is None else self._budget_w

    def _see(self, event: WorkerSeen, now_s: float) -> None:
        device = self._devices.get(event.worker)
        if 0 < event.cap_min_w <= event.cap_default_w and device is None:
            self._devices[event.worker] = _Device(
                role=event.role,
                cap_min_w=event.cap_min_w,
                cap_default_w=event.cap_default_w,
                seen_s=now_s,
                reported_w=event.cap_default_w,
            )

    def _note(self, load: WorkerLoad, now_s: float) -> None:
        device = self._devices.get(load.worker)
        if device is not None:
            device.seen_s = now_s
            device.lost = False
            device.reported_w = load.cap_w
            if load.running or load.waiting:
                device.busy_until_s = now_s + BUSY_FOR_S

    def _lose(self, worker: Incarnation) -> None:
        device = self._devices.get(worker)
        if device is not None:
            device.lost = True

    def _plan(self, now_s: float) -> list[SetCap]:
        self._bury(now_s)
        present = {name: device for name, device in self._devices.items() if not device.lost}
        spare_w = self._limit_w - sum(d.held_w for d in self._devices.values() if d.lost)
        targets_w = _split(spare_w, present.values(), now_s)
        free_w = self._limit_w - sum(device.held_w for device in self._devices.values())
        effects = []
        for (worker, device), target_w in zip(present.items(), targets_w, strict=True):
            cap_w = _next_cap_w(device, target_w, free_w)
            free_w -= max(0.0, cap_w - device.held_w)
            if cap_w != device.sent_w or self._due(device, now_s):
                device.sent_w, device.sent_s = cap_w, now_s
                effects.append(SetCap(worker, cap_w))
        return effects

    def _bury(self, now_s: float) -> None:
        for worker, device in tuple(self._devices.items()):
            device.lost = device.lost or now_s - device.seen_s >= SILENT_S
            if device.lost and now_s - device.sent_s >= self._lease_s:
                del self._devices[worker]

    def _due(self, device: _Device, now_s: float) -> bool:
        age_s = now_s - device.sent_s
        ignored = device.reported_w != device.sent_w and age_s >= ANSWER_S
        return ignored or age_s >= self._lease_s / 3


def _split(spare_w: float, devices: Iterable[_Device], now_s: float) -> list[float]:
    """A cap for each device: its lowest, and its share of what is left, by need."""
    devices = list(devices)
    caps_w = [device.cap_min_w for device in devices]
    left_w = max(0.0, spare_w - sum(caps_w))
    open_to = set(range(len(devices)))
    while open_to and left_w > 0:
        need = sum(devices[i].need(now_s) for i in open_to)
        unit_w = left_w / need
        full = {
            i
            for i in open_to
            if devices[i].cap_default_w - caps_w[i] <= unit_w * devices[i].need(now_s)
        }
        if not full:
            for i in open_to:
                caps_w[i] = _in_steps(caps_w[i], unit_w * devices[i].need(now_s))
            break
        for i in full:
            left_w -= devices[i].cap_default_w - caps_w[i]
            caps_w[i] = devices[i].cap_default_w
        open_to -= full
    return caps_w


def _in_steps(floor_w: float, share_w: float) -> float:
    return floor_w + share_w // STEP_W * STEP_W


def _next_cap_w(device: _Device, target_w: float, free_w: float) -> float:
    """The cap to send: a cut at once, a rise as far as free watts allow and if it is worth it."""
    now_w = device.reported_w if device.sent_w is None else device.sent_w
    now_w = min(max(now_w, device.cap_min_w), device.cap_default_w)
    if target_w <= now_w:
        return target_w
    most_w = min(target_w, device.held_w + max(0.0, free_w))
    worth_it = most_w - now_w >= LEAST_RISE_W or most_w == device.cap_default_w
    return max(now_w, most_w) if worth_it else now_w

"""What schedulers say of their queues, and whether one more request could be served in time.

A class waits as long as its own queue takes at its own pace, or a class before it does, whichever
is longer: the pace of a later class is measured while earlier ones take their part, so it holds
theirs already.

The queue is shared by shares: batch may fill half of it and standard three quarters, so that a
flood of what can wait leaves room for what cannot.
"""

from collections import Counter
from dataclasses import dataclass

from diptych_contracts.fleet import ClassQueue, QueueLoad
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import PriorityClass

FRESH_S = 2.0
"""Reports come every 0.25 s; an older one refuses nobody."""
REMEMBERED_S = 120.0
"""How long the pace of a scheduler that fell silent is used to say when to come back."""
MAX_SCHEDULERS = 256
SHARE_FRAC = {
    PriorityClass.INTERACTIVE: 1.0,
    PriorityClass.STANDARD: 0.75,
    PriorityClass.BATCH: 0.5,
}
_CLASSES = list(PriorityClass)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands that waits for its first token."""

    position: int
    """How many are served before it: of its own class, and all of earlier ones."""
    eta_s: float | None
    """When its first token is due, at the pace of late; None: not known."""
    own: int
    """How many of them are of its own class."""


class QueueView:
    """The queues of all schedulers, as a gateway knows them."""

    def __init__(self) -> None:
        self._loads: dict[Incarnation, tuple[QueueLoad, float]] = {}
        self._entered: Counter[PriorityClass] = Counter()
        """Let in since the last report."""

    def heard(self, load: QueueLoad, *, now_s: float) -> None:
        """A scheduler has reported."""
        self._entered.clear()
        self._loads.pop(load.scheduler, None)
        self._loads[load.scheduler] = (load, now_s)
        while len(self._loads) > MAX_SCHEDULERS:
            del self._loads[next(iter(self._loads))]

    def entered(self, priority_class: PriorityClass) -> None:
        """One more of the class was stored here."""
        self._entered[priority_class] += 1

    def wait_s(
        self, priority_class: PriorityClass, *, now_s: float, within_s: float = FRESH_S
    ) -> float:
        """How long one more of the class would wait for its first token; 0.0 if nobody waits."""
        rank = _CLASSES.index(priority_class)
        return max(self._drain_s(c, self._recent(now_s, within_s)) for c in _CLASSES[: rank + 1])

    def place(
        self, priority_class: PriorityClass, last: Place | None, *, now_s: float
    ) -> Place | None:
        """Where a request stands that was stored here; None if no scheduler reports.

        Who came later is counted too, so a place is never worse than the `last` one.
        """
        loads = self._recent(now_s, FRESH_S)
        if not loads:
            return last
        rank = _CLASSES.index(priority_class)
        own = max(self._waiting(priority_class, loads) - 1, 0)
        own = own if last is None else min(own, last.own)
        earlier = sum(self._waiting(c, loads) for c in _CLASSES[:rank])
        per_s = _pace_per_s(priority_class, loads)
        eta_s = None
        if per_s:
            drains_s = [self._drain_s(c, loads) for c in _CLASSES[:rank]]
            eta_s = round(max((own + 1) / per_s, *drains_s, 0.0), 1)
        return Place(own + earlier, eta_s, own)

    def full(self, priority_class: PriorityClass, *, now_s: float) -> bool:
        """Whether the class's share of the schedulers' queues is taken; False if none reports."""
        loads = self._recent(now_s, FRESH_S)
        most = sum(load.max_queued for load in loads) * SHARE_FRAC[priority_class]
        return bool(loads) and sum(load.queued for load in loads) >= most

    def storage_full(self, *, now_s: float) -> bool:
        """Whether no scheduler can write a record."""
        loads = self._recent(now_s, FRESH_S)
        return bool(loads) and all(load.storage_full for load in loads)

    def _recent(self, now_s: float, within_s: float) -> list[QueueLoad]:
        return [load for load, heard_s in self._loads.values() if now_s - heard_s <= within_s]

    def _drain_s(self, priority_class: PriorityClass, loads: list[QueueLoad]) -> float:
        per_s, waiting = _pace_per_s(priority_class, loads), self._waiting(priority_class, loads)
        return (waiting + 1) / per_s if waiting and per_s else 0.0

    def _waiting(self, priority_class: PriorityClass, loads: list[QueueLoad]) -> int:
        reported = sum(queue.waiting for queue in _queues(priority_class, loads))
        return reported + self._entered[priority_class]


def _queues(priority_class: PriorityClass, loads: list[QueueLoad]) -> list[ClassQueue]:
    return [q for load in loads for q in load.classes if q.priority_class == priority_class]


def _pace_per_s(priority_class: PriorityClass, loads: list[QueueLoad]) -> float:
    return sum(1 / queue.gap_s for queue in _queues(priority_class, loads) if queue.gap_s)

"""Whether a gateway takes one more request, and when to ask again if not.

The wait it names is computed for the request's own class: the mean time between the endings of late
where this gateway is full, and where the fleet is, what the queue before it takes at its own pace.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from diptych_contracts.requests import PriorityClass
from diptych_policy.queue_view import REMEMBERED_S, QueueView

RECENT_ENDINGS = 64
RECENT_S = 60.0
MIN_RETRY_S = 1.0
"""Also where nothing is known."""
DRAINING_RETRY_S = 5.0
"""Another gateway, or this one started again, answers by then."""
MAX_RETRY_S = 120.0
"""Clients' libraries give up on a longer wait."""


class Obstacle(Enum):
    """Why a request is not taken."""

    FULL = auto()
    """This gateway has no place."""
    DRAINING = auto()
    QUEUE_FULL = auto()
    """The class's share of the schedulers' queues is taken."""
    TOO_LATE = auto()
    """It would not have a first token within its deadline."""
    STORAGE_FULL = auto()
    """JetStream takes no more."""
    BUS_AWAY = auto()
    """JetStream did not answer."""


@dataclass(frozen=True, slots=True)
class Declined:
    """Not now."""

    obstacle: Obstacle
    retry_after_s: float
    """Within [1, 120]."""
    wait_s: float = 0.0
    """TOO_LATE: how long it would wait."""


class Admission:
    """Counts requests in flight against a limit, and looks at the queue before them.

    Args:
        limit: Most requests in flight.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a limit of {limit} admits nobody")
        self.limit = limit
        self.in_flight = 0
        self.draining = False
        self.queues = QueueView()
        self._endings: dict[PriorityClass, deque[float]] = {
            priority_class: deque(maxlen=RECENT_ENDINGS) for priority_class in PriorityClass
        }

    def enter(self, priority_class: PriorityClass, *, now_s: float) -> Declined | None:
        """Take one more, or say why not; who was taken must `leave`."""
        if self.draining:
            return Declined(Obstacle.DRAINING, DRAINING_RETRY_S)
        if self.in_flight >= self.limit:
            return Declined(Obstacle.FULL, self.next_place_s(priority_class, now_s=now_s))
        self.in_flight += 1
        return None

    def leave(self, priority_class: PriorityClass, *, now_s: float) -> None:
        """One less."""
        self.in_flight -= 1
        self._endings[priority_class].append(now_s)
        self.check()

    def in_time(
        self, priority_class: PriorityClass, *, first_token_s: float, now_s: float
    ) -> Declined | None:
        """Why a request of the class would not be served within `first_token_s`, if so."""
        queues = self.queues
        wait_s = queues.wait_s(priority_class, now_s=now_s)
        if queues.storage_full(now_s=now_s):
            return Declined(Obstacle.STORAGE_FULL, _retry_s(wait_s))
        if queues.full(priority_class, now_s=now_s):
            return Declined(Obstacle.QUEUE_FULL, _retry_s(wait_s))
        if wait_s > first_token_s:
            return Declined(Obstacle.TOO_LATE, _retry_s(wait_s), wait_s)
        return None

    def not_stored(
        self, priority_class: PriorityClass, obstacle: Obstacle, *, now_s: float
    ) -> Declined:
        """JetStream did not take a request: come back when the queue, as last heard, is through."""
        wait_s = self.queues.wait_s(priority_class, now_s=now_s, within_s=REMEMBERED_S)
        return Declined(obstacle, _retry_s(wait_s))

    def next_place_s(self, priority_class: PriorityClass, *, now_s: float) -> float:
        """When the next place falls free, by the endings of the class, or else of all."""
        own = self._endings[priority_class]
        for endings in (own, [ending for of in self._endings.values() for ending in of]):
            recent = [ending for ending in endings if now_s - ending <= RECENT_S]
            if recent:
                return _retry_s((now_s - min(recent)) / len(recent))
        return MIN_RETRY_S

    def check(self) -> None:
        """Raise if an invariant is broken."""
        if not 0 <= self.in_flight <= self.limit:
            raise AssertionError(f"{self.in_flight} in flight, the limit is {self.limit}")


def _retry_s(wait_s: float) -> float:
    return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)

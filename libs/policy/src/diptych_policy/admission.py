"""Whether a gateway takes one more request, and when to ask again if not.

The wait it names is computed: the mean time between the endings of late, which is when the next
place falls free.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

RECENT_ENDINGS = 64
RECENT_S = 60.0
UNKNOWN_RETRY_S = 1.0
DRAINING_RETRY_S = 5.0
"""Another gateway, or this one started again, answers by then."""
MAX_RETRY_S = 60.0
"""Clients' libraries give up on a longer wait at 120 s."""


class Obstacle(Enum):
    """Why a request is not taken."""

    FULL = auto()
    DRAINING = auto()


@dataclass(frozen=True, slots=True)
class Declined:
    """Not now."""

    obstacle: Obstacle
    retry_after_s: float


class Admission:
    """Counts requests in flight against a limit.

    Args:
        limit: Most requests in flight.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a limit of {limit} admits nobody")
        self.limit = limit
        self.in_flight = 0
        self.draining = False
        self._endings: deque[float] = deque(maxlen=RECENT_ENDINGS)

    def enter(self, *, now_s: float) -> Declined | None:
        """Take one more, or say why not; who was taken must `leave`."""
        if self.draining:
            return Declined(Obstacle.DRAINING, DRAINING_RETRY_S)
        if self.in_flight >= self.limit:
            return Declined(Obstacle.FULL, self._next_place_s(now_s))
        self.in_flight += 1
        return None

    def leave(self, *, now_s: float) -> None:
        """One less."""
        self.in_flight -= 1
        self._endings.append(now_s)
        self.check()

    def check(self) -> None:
        """Raise if an invariant is broken."""
        if not 0 <= self.in_flight <= self.limit:
            raise AssertionError(f"{self.in_flight} in flight, the limit is {self.limit}")

    def _next_place_s(self, now_s: float) -> float:
        recent = [ending for ending in self._endings if now_s - ending <= RECENT_S]
        if not recent:
            return UNKNOWN_RETRY_S
        gap_s = (now_s - recent[0]) / len(recent)
        return min(max(gap_s, UNKNOWN_RETRY_S), MAX_RETRY_S)

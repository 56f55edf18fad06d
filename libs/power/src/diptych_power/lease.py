"""Which cap is in force: a lease, and the default when there is none. Pure.

Rules:

1. A set-point holds until its lease ends; then the default is back.
2. Of one governor, only a set-point with a higher sequence counts: the bus may repeat and reorder.
3. The first set-point of another governor retires the one before for good: a governor that was only
   frozen cannot undo what its successor ordered.
"""

from collections import deque
from math import isfinite

from diptych_contracts.ids import Incarnation
from diptych_contracts.power import PowerSetPoint


class CapLease:
    """The cap of one device, between its limits."""

    def __init__(self, *, default_w: float, min_w: float) -> None:
        if not 0 < min_w <= default_w:
            raise ValueError(f"expected 0 < lowest cap <= default, got {min_w} and {default_w} W")
        self.default_w = default_w
        self.min_w = min_w
        self._cap_w = default_w
        self._until_s = 0.0
        self._governor: Incarnation | None = None
        self._sequence = 0
        self._retired: deque[Incarnation] = deque(maxlen=64)

    def offer(self, set_point: PowerSetPoint, now_s: float) -> bool:
        """Take a set-point, its cap moved between the limits; False if it does not count."""
        if not isfinite(set_point.cap_w) or set_point.lease_ms <= 0:
            return False
        if set_point.governor in self._retired:
            return False
        if set_point.governor == self._governor and set_point.sequence <= self._sequence:
            return False
        if self._governor not in (None, set_point.governor):
            self._retired.append(self._governor)
        self._governor = set_point.governor
        self._sequence = set_point.sequence
        self._cap_w = min(max(set_point.cap_w, self.min_w), self.default_w)
        self._until_s = now_s + set_point.lease_ms / 1000
        return True

    def cap_w(self, now_s: float) -> float:
        """The cap in force."""
        return self._cap_w if now_s < self._until_s else self.default_w

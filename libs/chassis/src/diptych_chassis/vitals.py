"""Signs of life that threads share: is it ready, did the main loop run lately, when did it beat.

Written by one thread, read by another; each value is replaced whole, so no lock is needed.
"""

from collections import deque
from dataclasses import dataclass

LIVE_WITHIN_S = 2.0
"""A main loop that served no probe for so long is not alive."""
_BEATS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the process serves, and if not, why."""

    ready: bool
    detail: str = ""


class Vitals:
    """The state of one process, as its own threads see it. Times are monotonic seconds."""

    def __init__(self, now_s: float) -> None:
        self.readiness = Readiness(ready=False, detail="starting")
        self.ever_ready = False
        self.patience_s = 0.0
        """How much longer than usual the next beat may take."""
        self._probed_s = now_s
        self._beats: deque[tuple[int, float]] = deque(maxlen=_BEATS_KEPT)

    def report(self, readiness: Readiness) -> None:
        """What beats and probes say from now on."""
        self.readiness = readiness
        self.ever_ready |= readiness.ready

    def probe_served(self, now_s: float) -> None:
        """The main loop runs."""
        self._probed_s = now_s

    def live(self, now_s: float) -> bool:
        """Whether the main loop served a probe within `LIVE_WITHIN_S`."""
        return now_s - self._probed_s <= LIVE_WITHIN_S

    def silent_s(self, now_s: float) -> float:
        """Since the main loop last served a probe."""
        return now_s - self._probed_s

    def beat_sent(self, count: int, now_s: float) -> None:
        """Beat number `count` left."""
        self._beats.append((count, now_s))

    @property
    def last_beat(self) -> int:
        """The number of the newest beat; 0 before the first."""
        return self._beats[-1][0] if self._beats else 0

    def beat_sent_s(self, count: int) -> float | None:
        """When beat `count` left; None if it never did, or over six seconds ago."""
        return next((at_s for n, at_s in reversed(tuple(self._beats)) if n == count), None)

"""How fast a class of requests is served, measured while somebody of it waits.

Served means: has its first token. The clock runs only while one waits, so an idle hour does not
look like a slow one; and one gap counts at most `MAX_GAP_S`, so that a stall is forgotten within
`RECENT` first tokens instead of turning clients away long after it.
"""

from collections import deque

RECENT = 32
MAX_GAP_S = 30.0
_USUAL = 4


class DrainRate:
    """The mean time between first tokens of one class."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=RECENT)
        self._since_s = 0.0
        """Waited for since the last first token."""
        self._last_s: float | None = None
        """When somebody was last seen to wait; None: nobody did."""

    def tick(self, *, waiting: bool, now_s: float) -> None:
        """Whether somebody of the class waits from now on."""
        if self._last_s is not None:
            self._since_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s if waiting else None

    def served(self, *, now_s: float) -> None:
        """One has its first token."""
        self.tick(waiting=self._last_s is not None, now_s=now_s)
        self._gaps_s.append(min(self._since_s, MAX_GAP_S))
        self._since_s = 0.0

    @property
    def gap_s(self) -> float:
        """The mean gap; more while the present one is out of all proportion. 0.0: not known yet.

        First tokens come in bunches, as places fall free: a gap of four times the mean is usual.
        """
        mean_s = sum(self._gaps_s) / len(self._gaps_s) if self._gaps_s else 0.0
        return max(mean_s, min(self._since_s / _USUAL, MAX_GAP_S))

"""When a tier that failed is asked again (pure).

    asked ──failure──▶ left alone ──pause over──▶ tried ──answer──▶ asked
                            ▲                       │
                            └──failure, pause x 2 ──┘

One caller tries; for the others the tier is left alone meanwhile.
"""

from dataclasses import dataclass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(slots=True)
class Patience:
    """With one tier."""

    why: str = ""
    """It is left alone; empty: it is asked."""
    _pause_s: float = 0.0
    _until_s: float = 0.0
    _tried: bool = False

    def allows(self, now_s: float) -> bool:
        """Whether the caller may ask it now; True after a failure makes the caller the one try."""
        if not self.why:
            return True
        if now_s < self._until_s:
            return False
        self._until_s = now_s + self._pause_s
        self._tried = True
        return True

    def failed(self, now_s: float, why: str) -> None:
        """It did not answer, for this reason."""
        if not self.why:
            self._pause_s = FIRST_PAUSE_S
        elif self._tried:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.why = why or "no reason"
        self._until_s = now_s + self._pause_s
        self._tried = False

    def answered(self) -> None:
        """It did: ask it as before."""
        self.why = ""
        self._tried = False

"""Whether a worker has been full for so long that its readiness should say so.

Full for a moment is how a busy worker works; full without a break means that nothing gets through:
a leak, a hung peer, or too little of it. It is ready again as soon as anything fits.
"""

LASTING_S = 2.0
"""Twice what a healthy hand-off takes under load."""


class Exhaustion:
    """Turns momentary fullness into a lasting reason.

    Args:
        lasting_s: How long there must have been no room without a break.
    """

    def __init__(self, lasting_s: float = LASTING_S) -> None:
        self._lasting_s = lasting_s
        self._since_s: float | None = None

    def reason(self, obstacle: str, *, now_s: float) -> str:
        """Why the worker is not ready; empty if it is.

        Args:
            obstacle: Why the smallest job would be refused now; empty: it would not.
            now_s: Monotonic seconds.
        """
        if not obstacle:
            self._since_s = None
            return ""
        if self._since_s is None:
            self._since_s = now_s
        return obstacle if now_s - self._since_s >= self._lasting_s else ""

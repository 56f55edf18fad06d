"""Mean power over the last second, from work that is reported only when it ends. Pure."""

from collections import deque


class PowerWindow:
    """Busy time of the last `span_s` seconds.

    Steps are reported without a time of their own: those reported between two readings are taken to
    lie end to end just before the later one (readings come every 0.1 s, so that is the error).
    """

    def __init__(self, span_s: float = 1.0) -> None:
        self._span_s = span_s
        self._new: deque[tuple[float, float]] = deque(maxlen=4096)
        self._busy: deque[tuple[float, float, float]] = deque()

    def add(self, duration_s: float, above_idle_w: float) -> None:
        """Work of `duration_s` has just ended; it drew so much more than an idle device."""
        self._new.append((duration_s, above_idle_w))

    def mean_above_idle_w(self, now_s: float) -> float:
        """Mean power above idle over the window that ends now."""
        end_s = now_s
        fresh = []
        while self._new:
            duration_s, watts = self._new.pop()
            fresh.append((end_s - duration_s, end_s, watts))
            end_s -= duration_s
        self._busy.extend(reversed(fresh))
        start_s = now_s - self._span_s
        while self._busy and self._busy[0][1] <= start_s:
            self._busy.popleft()
        joules = sum((end - max(begin, start_s)) * watts for begin, end, watts in self._busy)
        return joules / self._span_s

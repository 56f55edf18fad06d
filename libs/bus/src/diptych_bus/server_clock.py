"""The server's wall clock, as far as a client knows it. Pure; its own time is an argument.

Wall clocks of hosts differ, and are set: what members must agree on is dated by the server, the one
clock all of them share. Its stamps come with stored messages and are never ahead of it; the one
that was the least time on its way is the best estimate. Kept against a monotonic clock, so it does
not jump with this host's own.
"""

from collections.abc import Callable

FORGET_S = 600.0
"""A server's clock may be set back: a stamp counts no longer than twice this."""


class ServerClock:
    """An estimate that the newest stamps correct.

    Args:
        now_s: This process's monotonic clock.
        wall_ms: What to believe before there is a stamp: this host's own wall clock.
    """

    def __init__(self, now_s: Callable[[], float], wall_ms: Callable[[], int]) -> None:
        self._now_s = now_s
        self._wall_ms = wall_ms
        self._ahead_ms: float | None = None
        self._former_ms: float | None = None
        self._since_s = now_s()

    def stamped(self, unix_ms: float) -> None:
        """A message has come that the server stored at `unix_ms`."""
        now_s = self._now_s()
        if now_s - self._since_s >= FORGET_S:
            self._former_ms, self._ahead_ms, self._since_s = self._ahead_ms, None, now_s
        ahead_ms = unix_ms - now_s * 1000
        self._ahead_ms = ahead_ms if self._ahead_ms is None else max(self._ahead_ms, ahead_ms)

    def unix_ms(self) -> int:
        """The server's wall time now."""
        known = [ms for ms in (self._ahead_ms, self._former_ms) if ms is not None]
        return round(max(known) + self._now_s() * 1000) if known else self._wall_ms()

"""KV that a prefill engine keeps for a decode worker that will not fetch it."""

from collections.abc import Callable


class Orphans:
    """Hand-offs that were offered and not taken, for as long as the engine holds their KV.

    Args:
        now_s: Monotonic seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._until_s: list[float] = []
        self.total = 0
        """All there ever were."""

    def add(self, kept_s: float) -> None:
        """One more, kept for so long; 0: the engine freed it with the attempt."""
        self.total += 1
        if kept_s > 0:
            self._until_s.append(self._now_s() + kept_s)

    @property
    def pinned(self) -> int:
        """Those whose KV is still held."""
        now_s = self._now_s()
        self._until_s = [until_s for until_s in self._until_s if until_s > now_s]
        return len(self._until_s)

"""How fast a tier gives what is asked of it, measured (pure).

Bytes over the time in which at least one call was under way, so that calls beside one another do
not count twice. It begins with a guess that weighs as much as a tenth of a second of measuring, and
old measurements fade: after five seconds of reading the first one weighs half.
"""

from dataclasses import dataclass

_GUESS_S = 0.1
_FADE_S = 5.0


@dataclass(slots=True)
class Speed:
    """Of one tier."""

    guess_bytes_per_s: float
    _bytes: float = 0.0
    _seconds: float = 0.0
    _calls: int = 0
    _since_s: float = 0.0

    def __post_init__(self) -> None:
        self._bytes, self._seconds = self.guess_bytes_per_s * _GUESS_S, _GUESS_S

    @property
    def bytes_per_s(self) -> float:
        """As far as is known."""
        return self._bytes / self._seconds

    def began(self, now_s: float) -> None:
        """A call is under way."""
        if self._calls == 0:
            self._since_s = now_s
        self._calls += 1

    def ended(self, now_s: float, n_bytes: int) -> None:
        """A call has given `n_bytes`; 0, a miss, says nothing of how long bytes take."""
        self._calls -= 1
        if not n_bytes:
            return
        self._seconds += max(0.0, now_s - self._since_s)
        self._since_s = now_s
        self._bytes += n_bytes
        if self._seconds > 2 * _FADE_S:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

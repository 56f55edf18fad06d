"""Stop strings, found across token borders.

A string may be cut by tokens anywhere, so text that could be the beginning of one is held back.
The match that is *complete first* counts (of two that end together, the longer): that is the only
order which does not depend on how the text was dealt out, and worker and gateway must agree.
"""

from collections.abc import Sequence

from diptych_contracts.errors import InvalidRequest

MAX_STOP_STRINGS = 4


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also a suffix."""
    table = [0] * len(stop)
    matched = 0
    for position in range(1, len(stop)):
        while matched and stop[position] != stop[matched]:
            matched = table[matched - 1]
        matched += stop[position] == stop[matched]
        table[position] = matched
    return table


class _Searcher:
    """Knuth-Morris-Pratt search for one stop string, a character at a time."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._table = _failure_table(stop)
        self.matched = 0
        """Length of the longest prefix of the string that the text so far ends with."""

    def feed(self, character: str) -> bool:
        """Take one character; whether the string is complete."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._table[self.matched - 1]
        self.matched += self._stop[self.matched] == character
        return self.matched == len(self._stop)


class StopMatcher:
    """Lets text through up to the first stop string.

    Args:
        stop: At most 4 non-empty strings.

    Raises:
        InvalidRequest: for more, or for an empty one.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stop)}",
                param="stop",
            )
        if not all(stop):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._searchers = [_Searcher(string) for string in stop]
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; everything before it was let through."""

    def push(self, text: str) -> str:
        """The text that cannot be part of a stop string any more."""
        if self.stopped or not self._searchers:
            return "" if self.stopped else text
        text_start = len(self._held)
        self._held += text
        for end in range(text_start, len(self._held)):
            character = self._held[end]
            complete = [s.matched for s in self._searchers if s.feed(character)]
            if complete:
                self.stopped = True
                return self._release(end + 1 - max(complete))
        return self._release(len(self._held) - max(s.matched for s in self._searchers))

    def finish(self) -> str:
        """The text that was held back, now that none will follow."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released

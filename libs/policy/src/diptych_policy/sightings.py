"""Which KV blocks are worth a write: those that have been seen before.

Most prompts are never sent again, and a write costs a copy, room, and what is evicted for it. So a
block is written at its second sighting (or as told) within a window: the *doorkeeper* of TinyLFU
(Einziger, Friedman, Manes 2017), with two generations of a set in place of its Bloom filter. A
generation is as long as the window; when the younger is full, the older is forgotten. What is seen
again moves into the younger, so blocks in use stay known.
"""

_WINDOW = 32_768
"""Blocks to a generation: two million tokens; 10 MB at most in all."""
_DIGITS = 16
_WRITTEN = -1


class Sightings:
    """The blocks one worker has met lately, by the hexadecimal hash of their keys.

    Args:
        needed: At which sighting a block is written; 1: at once.
        window: Blocks to a generation.
    """

    def __init__(self, *, needed: int = 2, window: int = _WINDOW) -> None:
        self._needed = max(1, needed)
        self._window = window
        self._young: dict[int, int] = {}
        """How often each was seen, `needed` at most; or that it is written."""
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def see(self, block: str) -> bool:
        """A prompt holds `block`; gives whether it is to be written: seen enough, not written."""
        name = _name(block)
        count = self._take(name)
        if count != _WRITTEN:
            count = min(count + 1, self._needed)
        self._put(name, count)
        return count == self._needed

    def written(self, block: str) -> None:
        """The tiers have `block`."""
        name = _name(block)
        self._take(name)
        self._put(name, _WRITTEN)

    def lost(self, block: str) -> None:
        """They have it no more: if it was written, it is again when it is seen next."""
        name = _name(block)
        if count := self._take(name):
            self._put(name, self._needed - 1 if count == _WRITTEN else count)

    def _take(self, name: int) -> int:
        young = self._young.pop(name, 0)
        return young or self._old.pop(name, 0)

    def _put(self, name: int, count: int) -> None:
        if len(self._young) >= self._window:
            self._old, self._young = self._young, {}
        self._young[name] = count


def _name(block: str) -> int:
    return int(block[:_DIGITS], 16)

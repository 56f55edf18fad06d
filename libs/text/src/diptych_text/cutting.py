"""Where a long text can be cut so that its parts have the tokens of the whole.

Tokenizers work on words: what they cut first, by patterns (`pretokenizing`), is merged by itself.
All known patterns begin a new word where, after a letter, one character follows that is neither
letter, digit nor line break, and then a letter: `sea| and`, `well|-known`, `don|'t`; or where a
digit does: `f|3`. None of them looks behind, and a run of letters does not look ahead. So a cut
there changes no token.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

PART_CHARS = 65_536
"""20 to 40 ms of tokenizing. In one piece 2 MB took 4.4 s, in such parts 1.3 s, and a tenth of the
memory (a token costs a hundred bytes while its piece is worked on)."""


MAX_UNCUT_CHARS = 1_000_000
"""Longest text without a place for a cut: up to 8 s of tokenizing, and 0.3 GB while it lasts."""
_DIGITS = frozenset("0123456789")


class Cutter:
    """Cuts text for one tokenizer.

    Args:
        whole: Texts that are tokens as they stand, and must not be cut.
    """

    def __init__(self, whole: Iterable[str]) -> None:
        texts = sorted(filter(None, whole), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._longest = max(map(len, texts), default=0)

    def parts(self, text: str, *, chars: int = PART_CHARS) -> Iterator[str]:
        """`text` in parts of `chars` characters at most, longer where it has no place for a cut."""
        start = 0
        while len(text) - start > chars:
            end = self._place(text, start + chars // 2, start + chars)
            if end is None:
                break
            yield text[start:end]
            start = end
        yield text[start:] if start else text

    def _place(self, text: str, low: int, high: int) -> int | None:
        """The last place in (low, high], or the first one after it."""
        for place in chain(range(high, low, -1), range(high + 1, len(text) - 1)):
            if self._fits(text, place):
                return place
        return None

    def _fits(self, text: str, place: int) -> bool:
        if not text[place - 1 : place].isalpha():
            return False
        first, second = text[place : place + 1], text[place + 1 : place + 2]
        word = second.isalpha() and not first.isalnum() and first not in "\r\n"
        return (word or first in _DIGITS) and not self._inside_token(text, place)

    def _inside_token(self, text: str, place: int) -> bool:
        start = max(0, place - self._longest)
        around = text[start : place + self._longest]
        found = self._whole.finditer(around)
        return any(match.start() < place - start < match.end() for match in found)

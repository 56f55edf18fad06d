"""Logprobs wait for their text.

A token is told with the piece of text that its first character is in, so text that is held back
(half a character, what may become a stop string) holds its tokens' logprobs back too.
At the end all tokens that are left are told; after a stop string none: its tokens are not shown.
"""

from collections import deque
from typing import NamedTuple

from diptych_contracts.journal import Chances
from diptych_text.detokenizing import Detokenizer, TokenBytes


class TokenChance(NamedTuple):
    """How likely a token of the answer was, and which others were."""

    offset: int
    """Where its text begins, in characters of the answer's."""
    chances: Chances


class ChanceTrail:
    """The logprobs of one answer that were not told yet."""

    def __init__(self, codec: TokenBytes) -> None:
        self._detokenizer = Detokenizer(codec)
        self._waiting: deque[TokenChance] = deque()
        self._chars = 0
        self._shown = 0

    def push(self, token_id: int, chances: Chances) -> None:
        """The answer's next token."""
        self._waiting.append(TokenChance(self._chars, chances))
        self._chars += len(self._detokenizer.push((token_id,)))

    def shown(self, text: str) -> tuple[TokenChance, ...]:
        """The tokens of `text`, which follows what was shown so far."""
        self._shown += len(text)
        told = []
        while self._waiting and self._waiting[0].offset < self._shown:
            told.append(self._waiting.popleft())
        return tuple(told)

    def rest(self) -> tuple[TokenChance, ...]:
        """All that are left."""
        told = tuple(self._waiting)
        self._waiting.clear()
        return told

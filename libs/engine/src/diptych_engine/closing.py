"""The shortest way to end an answer that follows a grammar.

Found byte by byte: what is forced is taken, else the byte that is likeliest to close something. So
it is no proof of the shortest, but for JSON within a token or two of it, and cheap: 1 us a byte.
"""

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

MAX_ENDING_BYTES = 4096
"""Longer endings are not looked for: 20 ms of a step that others wait for."""
MOST_BYTES = 16
"""Reckoned for one token: an ending of n tokens is looked for in 16 n bytes."""
_LETTERS = bytes([*range(ord("a"), ord("z") + 1), *range(ord("0"), ord("9") + 1)])
_OPENERS = b":-.[{\\"
_CLOSING = b'}]",' + _LETTERS + _OPENERS
_QUOTING = b'",' + _LETTERS[::-1] + b"}]" + _OPENERS
_BRACKETS = b"}]"
"""Both are allowed only within a string."""
_CONTINUING = range(0x80, 0xC0)
"""Bytes of UTF-8 that continue a character."""
_Order = list[tuple[int, int]]
"""(byte, token), the one to try first in front."""


class Endings:
    """Finds endings in the tokens of one model.

    Args:
        tokenizer: llguidance's.
        byte_tokens: Tokens of a single byte, by byte.
        eos_id: A token that ends an answer.
    """

    def __init__(self, tokenizer: LLTokenizer, byte_tokens: dict[int, int], eos_id: int) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens
        self._eos_id = eos_id
        self._closing = self._known(_CLOSING)
        self._quoting = self._known(_QUOTING)
        self._brackets = [token for _, token in self._known(_BRACKETS)]

    def holds(self, matcher: LLMatcher, ending: Sequence[int]) -> bool:
        """Whether `ending` still leads from here to where an answer may end."""
        return matcher.validate_tokens([*ending, self._eos_id]) == len(ending) + 1

    def shortest(self, matcher: LLMatcher, *, tokens: int) -> tuple[int, ...] | None:
        """Tokens that end the answer from here; None if no ending of so many is found."""
        most_bytes = min(MAX_ENDING_BYTES, tokens * MOST_BYTES)
        for order in (self._closing, self._quoting):
            found = self._greedy(matcher.deep_copy(), order, most_bytes)
            if found is None:
                continue
            for ending in (self._spelled(found), [self._byte_tokens.get(b, -1) for b in found]):
                if -1 not in ending and self.holds(matcher, ending):
                    return tuple(ending)
        return None

    def _greedy(self, matcher: LLMatcher, order: _Order, most_bytes: int) -> bytes | None:
        found = bytearray()
        while len(found) <= most_bytes and not matcher.is_error():
            if matcher.is_accepting():
                return bytes(found)
            forced = matcher.compute_ff_bytes() or self._chosen(matcher, order)
            if not forced or not matcher.consume_tokens(self._spelled(forced)):
                return None
            found += forced
        return None

    def _chosen(self, matcher: LLMatcher, order: _Order) -> bytes:
        """The first byte of `order` that is allowed; within a string its end, or a letter."""
        if all(matcher.validate_tokens([token]) for token in self._brackets):
            order = self._quoting
        for byte, token in order:
            if matcher.validate_tokens([token]):
                return bytes([byte])
        return b""

    def _spelled(self, text: bytes) -> list[int]:
        """`text` in few tokens."""
        start = 0
        while start < len(text) and text[start] in _CONTINUING:
            start += 1
        ids = [self._byte_tokens.get(byte, -1) for byte in text[:start]]
        try:
            return ids + self._tokenizer.greedy_tokenize(text[start:].decode())
        except UnicodeDecodeError:  # the beginning of a character
            return ids + [self._byte_tokens.get(byte, -1) for byte in text[start:]]

    def _known(self, first: bytes) -> _Order:
        """All bytes there are tokens of, `first` first."""
        order = [*first, *(byte for byte in range(256) if byte not in first)]
        return [(byte, self._byte_tokens[byte]) for byte in order if byte in self._byte_tokens]

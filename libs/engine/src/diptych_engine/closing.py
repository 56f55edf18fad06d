"""The shortest way to end an answer that follows a grammar.

Found byte by byte: what is forced is taken, else a byte that closes something, else any, the same
again and again first (`aaaa` is one token), then each time another one. So it is no proof of the
shortest, but for JSON within a token or two of it, and cheap: 0.1 to 0.5 ms.
"""

import re
from collections import Counter
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

MAX_ENDING_BYTES = 4096
"""Longer endings are not looked for: some 20 ms of a step that others wait for."""
_SHORT_BYTES = 256
"""Within so many both ways are tried before a longer ending is looked for, in one way."""
MOST_BYTES = 16
"""Reckoned for one token: an ending of n tokens is looked for in 16 n bytes."""
_CLOSERS = b'}]",'
_ENDS = (b"}", b"]", b'"', b",")
_LETTERS = bytes([*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)])
_DIGITS = bytes(range(ord("0"), ord("9") + 1))
_SIGNS = b"@.-_/:+"
_OPENERS = b"[{\\"
_CONTROL = re.compile(rb"(\xff\[[0-9]+\])")
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
        self._closers = self._known(_CLOSERS)
        self._repeating = self._known(_LETTERS[:26] + _DIGITS + _SIGNS + _OPENERS, all_others=True)
        self._varied = self._known(_SIGNS + _LETTERS + _DIGITS, all_others=True)
        self._quote = self._known(b'"')
        self._letter = [byte_tokens[byte] for byte in b"a" if byte in byte_tokens]

    def holds(self, matcher: LLMatcher, ending: Sequence[int]) -> bool:
        """Whether `ending` still leads from here to where an answer may end."""
        if not ending:
            return matcher.is_accepting()
        return matcher.validate_tokens([*ending, self._eos_id]) == len(ending) + 1

    def shortest(self, matcher: LLMatcher, *, tokens: int) -> tuple[int, ...] | None:
        """Tokens that end the answer from here; None if no ending of so many is found."""
        longest = min(MAX_ENDING_BYTES, tokens * MOST_BYTES)
        short = min(_SHORT_BYTES, longest)
        for limit, varied in ((short, False), (short, True), (longest, False)):
            found = self._greedy(matcher.deep_copy(), limit, varied=varied)
            if found is None:
                continue
            for ending in (self._spelled(found), [self._byte_tokens.get(b, -1) for b in found]):
                if -1 not in ending and self.holds(matcher, ending):
                    return tuple(ending)
        return None

    def _greedy(self, matcher: LLMatcher, most_bytes: int, *, varied: bool) -> bytes | None:
        found = bytearray()
        used: Counter[int] = Counter()
        while len(found) <= most_bytes and not matcher.is_error():
            if matcher.is_accepting():
                return bytes(found)
            forced = matcher.compute_ff_bytes()
            if not forced:
                order = self._varied_by(used, bytes(found[-1:])) if varied else self._repeating
                forced = self._chosen(matcher, order)
                used = used + Counter(forced) if forced not in _ENDS else Counter()
            ids = self._spelled(forced)
            if not ids or -1 in ids or not matcher.consume_tokens(ids):
                return None
            found += forced
        return None

    def _varied_by(self, used: Counter[int], last: bytes) -> _Order:
        """A sign behind a letter or digit and the other way round, the least used first.

        So a number above 0 or a version never goes on with zeros alone.
        """
        behind_sign = not last.isalnum()

        def rank(candidate: tuple[int, int]) -> tuple[bool, int]:
            byte = candidate[0]
            return (byte in _SIGNS) is behind_sign, used[byte]

        return sorted(self._varied, key=rank)

    def _chosen(self, matcher: LLMatcher, order: _Order) -> bytes:
        """The first byte that is allowed, one that closes if possible.

        Where a letter may stand a bracket closes nothing: that is within a string.
        """
        in_string = all(matcher.validate_tokens([token]) for token in self._letter)
        for byte, token in [*(self._quote if in_string else self._closers), *order]:
            if matcher.validate_tokens([token]):
                return bytes([byte])
        return b""

    def _spelled(self, text: bytes) -> list[int]:
        """`text` in few tokens; control tokens stand in it as llguidance writes them."""
        ids: list[int] = []
        for part in _CONTROL.split(text):
            if control := _CONTROL.fullmatch(part):
                ids.append(int(control[0][2:-1]))
            else:
                ids += self._plain(part)
        return ids

    def _plain(self, text: bytes) -> list[int]:
        start = 0
        while start < len(text) and text[start] in _CONTINUING:
            start += 1
        ids = [self._byte_tokens.get(byte, -1) for byte in text[:start]]
        try:
            return ids + self._tokenizer.greedy_tokenize(text[start:].decode())
        except UnicodeDecodeError:  # the beginning of a character
            return ids + [self._byte_tokens.get(byte, -1) for byte in text[start:]]

    def _known(self, first: bytes, *, all_others: bool = False) -> _Order:
        """The bytes of `first` there are tokens of, and behind them all others."""
        others = (byte for byte in range(256) if byte not in first)
        order = [*first, *others] if all_others else first
        return [(byte, self._byte_tokens[byte]) for byte in order if byte in self._byte_tokens]

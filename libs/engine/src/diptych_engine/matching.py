"""Answers that follow a grammar: which tokens are allowed next, and how an answer ends in time.

A matcher's state is a pure function of (grammar, longest length, tokens of the answer). It is never
stored: a sequence that goes on elsewhere, after a hand-over or a recovery, replays its tokens.

**Ending in time.** Beside its state a matcher keeps an *ending*: tokens that lead from here to a
place where the answer may end. A token after which no ending would fit what is left of `max_tokens`
is not taken; the first token of the ending is. So an answer whose ending fits at its start always
ends valid, never cut. Far from the end this changes nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from diptych_contracts.errors import Permanent
from diptych_contracts.sampling import Grammar
from diptych_engine.closing import MAX_ENDING_BYTES, Endings
from diptych_text.grammars import matching_limits, spelled
from diptych_text.panics import panic_as

MAX_KEPT = 64
"""Grammars ready for the next request: about 30 KB each at first."""
MAX_USES = 1000
"""Then a grammar is set up afresh: what its answers had in common, up to 20 MB of states, goes."""
FREE_TOKENS = 128
"""With more than this left, a token after which no ending is found is taken all the same: then
the answer is no longer watched over, and may be cut."""


class TokenTexts(Protocol):
    """What each token stands for: `diptych_text.codec.TextCodec`."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes of a token; none for those that steer the model."""
        ...


class _Vocabulary:
    """The tokens in the form that llguidance asks for."""

    bos_token_id: int | None = None

    def __init__(self, codec: TokenTexts, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.tokens = [codec.token_bytes(token) for token in range(codec.vocab_size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self.spell: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a grammar forces: the longest first, whatever the model's way.

        `bytes` are refused by a `TypeError`, which says to ask with `str`.
        """
        if isinstance(text, bytes):
            raise TypeError("expected str")
        return self.spell(text) if self.spell is not None else []


class Matcher:
    """Follows one answer. Used by one thread at a time.

    Args:
        start: At the answer's beginning; owned from here on.
        endings: Finds endings.
        ending: One from the beginning, if known.
        eos_ids: Tokens that end an answer.
    """

    def __init__(
        self,
        start: LLMatcher,
        endings: Endings,
        ending: tuple[int, ...] | None,
        *,
        eos_ids: frozenset[int],
    ) -> None:
        self._state = start
        self._endings = endings
        self._ending = ending
        self._eos_ids = eos_ids
        self._eos = sorted(eos_ids)

    @property
    def complete(self) -> bool:
        """Whether the answer matches and nothing can follow."""
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def accepting(self) -> bool:
        """Whether the answer, as it stands, matches."""
        return self._state.is_accepting()

    def allowed(self, vocab_size: int, *, ignore_eos: bool = False) -> NDArray[np.bool_]:
        """Which tokens may follow, `[vocab_size]`.

        Args:
            vocab_size: How many tokens there are.
            ignore_eos: Disallow the end of text wherever something else may follow.

        Raises:
            Permanent: the grammar is too costly to go on with.
        """
        packed = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        if self._state.is_error():
            raise Permanent(f"the grammar cannot be followed: {_first_line(self._state)}")
        bits = np.unpackbits(packed, count=vocab_size, bitorder="little").view(np.bool_)
        if ignore_eos:
            others = bits.copy()
            others[self._eos] = False
            return others if others.any() else bits
        return bits

    def settle(self, token: int, *, left: int) -> int | None:
        """Take `token`, or what must come in its place to end within `left` tokens.

        None: the answer ends here, before a token.

        Raises:
            Permanent: `token` is not allowed.
        """
        if token in self._eos_ids:
            return None
        state, ending = self._after(token, left=left - 1)
        if self._may_take(ending, left=left):
            self._state, self._ending = state, ending
            return token
        return self._close()

    def replay(self, tokens: Sequence[int], *, left: int) -> None:
        """Take tokens that were settled before; `left` as it was before the first of them.

        Raises:
            Permanent: they do not match.
        """
        for at, token in enumerate(tokens):
            self._state, self._ending = self._after(token, left=left - at - 1)

    def _after(self, token: int, *, left: int) -> tuple[LLMatcher, tuple[int, ...] | None]:
        state, ending = self._state.deep_copy(), self._ending
        if not state.consume_token(token):
            raise Permanent(f"token {token} does not match the grammar: {_first_line(state)}")
        if ending is None:  # the search was in vain once, and costs too much to try every time
            return state, None
        if ending and ending[0] == token:
            return state, ending[1:]
        if len(ending) <= left and self._endings.holds(state, ending):
            return state, ending
        return state, self._endings.shortest(state, tokens=left)

    def _may_take(self, after: tuple[int, ...] | None, *, left: int) -> bool:
        """Whether an ending `after` the token fits, or none would have anyway."""
        if self._ending is None or len(self._ending) > left:
            return True
        if after is None:
            return left > FREE_TOKENS
        return len(after) < left

    def _close(self) -> int | None:
        if not self._ending:
            return None
        token, self._ending = self._ending[0], self._ending[1:]
        if not self._state.consume_token(token):
            raise Permanent(f"the grammar cannot be followed: {_first_line(self._state)}")
        return token


@dataclass(slots=True)
class _Start:
    """A grammar, ready."""

    state: LLMatcher
    ending: tuple[int, ...] | None
    uses: int = 0


class Grammars:
    """Makes matchers for the tokens of one model. Used by one thread at a time.

    Building takes 0.15 s and 11 MB for 49,000 tokens.

    Args:
        codec: What tokens stand for.
        eos_ids: Tokens that end an answer, at least one.
    """

    def __init__(self, codec: TokenTexts, eos_ids: Sequence[int]) -> None:
        vocabulary = _Vocabulary(codec, eos_ids[0])
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary),
            n_vocab=codec.vocab_size,
            eos_token=list(eos_ids),
            slices=LLTokenizer.json_slices(),
        )
        vocabulary.spell = self._tokenizer.greedy_tokenize
        single = {text[0]: id_ for id_, text in enumerate(vocabulary.tokens) if len(text) == 1}
        self._endings = Endings(self._tokenizer, single, eos_ids[0])
        self._eos_ids = frozenset(eos_ids)
        self._kept: OrderedDict[Grammar, _Start] = OrderedDict()

    def matcher(self, grammar: Grammar, answer_ids: Sequence[int], *, max_tokens: int) -> Matcher:
        """A matcher behind `answer_ids`, of an answer of at most `max_tokens` in all.

        Some 1 ms for a new grammar (100 ms for very large ones), 40 us per token replayed.

        Raises:
            Permanent: the grammar is broken or too large, or the tokens do not match it.
        """
        start = self._start(grammar)
        state = start.state.deep_copy()
        matcher = Matcher(state, self._endings, start.ending, eos_ids=self._eos_ids)
        matcher.replay(answer_ids, left=max_tokens)
        return matcher

    def _start(self, grammar: Grammar) -> _Start:
        start = self._kept.get(grammar)
        if start is None or start.uses >= MAX_USES:
            start = self._kept[grammar] = self._set_up(grammar)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        start.uses += 1
        self._kept.move_to_end(grammar)
        return start

    def _set_up(self, grammar: Grammar) -> _Start:
        with panic_as(Permanent):
            text = spelled(grammar)
            state = LLMatcher(self._tokenizer, text, log_level=0, limits=matching_limits())
        if state.is_error():
            raise Permanent(f"the grammar cannot be used: {_first_line(state)}")
        return _Start(state, self._endings.shortest(state, tokens=MAX_ENDING_BYTES))


def _first_line(state: LLMatcher) -> str:
    return state.get_error().strip().split("\n", 1)[0][:200]

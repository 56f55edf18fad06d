"""From outputs that grow to what is new in them.

The engine's token ids are cumulative and the object is the same at every step. Its own differences
(`token_ids_diff`) are not used: between versions they changed meaning where decode goes on after a
hand-off.
"""

from collections.abc import Sequence
from typing import Any

from diptych_contracts.errors import Refused, Unverified
from diptych_contracts.journal import Chances, EndReason
from diptych_engine.port import SequenceWork
from diptych_engine.request_port import TokenDelta

BROKEN = "engine_error"
FINISHES = {"stop": EndReason.STOP, "length": EndReason.LENGTH}
GOES_ON = frozenset({None, "not_finished"})


class Cursor:
    """What of one answer has been told.

    Args:
        work: Whose answer it is. Decode's outputs begin with prefill's token.
        eos_ids: Tokens that end an answer; some versions leave the one that did in the outputs.
        drafts: Whether more than one token at once means accepted drafts.
    """

    def __init__(self, work: SequenceWork, eos_ids: Sequence[int], *, drafts: bool = False) -> None:
        self._top = work.sampling.top_logprobs
        self._eos_ids = frozenset() if work.stopping.ignore_eos else frozenset(eos_ids)
        self._first = work.answer_ids[-1] if work.hand_off is not None else None
        self._told = 0 if self._first is None else 1
        self._drafts = drafts
        self._said_cached = False

    def take(self, output: Any, *, cached: int | None = None) -> TokenDelta:
        """What is new in the engine's output.

        Raises:
            Unverified: decode goes on after another token than prefill's.
            Refused: the engine gave the answer up.
        """
        ids: list[int] = output.token_ids or []
        reason = output.finish_reason
        if reason not in FINISHES and reason not in GOES_ON:
            raise Refused(BROKEN, f"the engine ended the answer with {reason!r}")
        finish = FINISHES.get(reason)
        end = len(ids)
        if finish is EndReason.STOP and end and ids[-1] in self._eos_ids:
            end -= 1
        if self._first is not None and ids and ids[0] != self._first:
            raise Unverified("decode's answer does not begin with prefill's token")
        start, self._told = self._told, max(self._told, end)
        new = tuple(ids[start:end])
        said, self._said_cached = self._said_cached, self._said_cached or bool(ids)
        return TokenDelta(
            new,
            finish,
            self._logprobs(output, ids, start, end),
            None if said else cached,
            max(0, len(new) - 1) if self._drafts else 0,
        )

    def _logprobs(
        self, output: Any, ids: Sequence[int], start: int, end: int
    ) -> tuple[Chances, ...]:
        if self._top is None:
            return ()
        told = output.logprobs or []
        # Those of prefill's token are not always there: counted from the end both agree.
        missing = len(ids) - len(told)
        if end > start and start < missing:
            raise Refused(BROKEN, f"{len(ids)} tokens came with {len(told)} logprobs")
        return tuple(chances_of(told[at - missing], ids[at], self._top) for at in range(start, end))


def chances_of(told: Any, token: int, top: int) -> Chances:
    """The chosen token's logprob, then the `top` likeliest ones."""
    if token not in told:
        raise Refused(BROKEN, f"the engine gave no logprob of the token it chose ({token})")
    likeliest = sorted(told.items(), key=lambda one: -one[1].logprob)[:top]
    return (
        (token, float(told[token].logprob)),
        *((int(other), float(chance.logprob)) for other, chance in likeliest),
    )

"""What is new in the parts of a stream.

A part has the tokens since the one before, but whether decode's first part repeats prefill's token
differs between versions. The count of all tokens stands in each part, so it says where they belong.
"""

from collections.abc import Sequence

from diptych_contracts.errors import Refused, Unverified
from diptych_contracts.journal import EndReason
from diptych_engine.port import SequenceWork
from diptych_engine.request_port import TokenDelta
from diptych_engine.tensorrt_llm.cursors import BROKEN, FINISHES, GOES_ON
from diptych_engine.tensorrt_llm.serve_wire import Choice, Completion


class PartCursor:
    """What of one answer has been told.

    Args:
        work: Whose answer it is.
        eos_ids: Tokens that end an answer.
    """

    def __init__(self, work: SequenceWork, eos_ids: Sequence[int]) -> None:
        self._eos_ids = frozenset() if work.stopping.ignore_eos else frozenset(eos_ids)
        self._first = work.answer_ids[-1] if work.hand_off is not None else None
        self._told = 0 if self._first is None else 1
        self._said_cached = False

    def whole(self, told: Completion) -> TokenDelta:
        """An answer that was not streamed."""
        return self._delta(told, told.choices[0], told.choices[0].token_ids or [], 0)

    def take(self, part: Completion) -> TokenDelta:
        """What is new in `part`.

        Raises:
            Unverified: decode goes on after another token than prefill's.
            Refused: tokens are missing, or the engine gave the answer up.
        """
        if not part.choices:
            return TokenDelta(())
        choice = part.choices[0]
        ids = choice.token_ids or []
        if part.usage is None or part.usage.completion_tokens is None:
            raise Refused(BROKEN, "trtllm-serve does not count the tokens of a part")
        start = part.usage.completion_tokens - len(ids)
        if start < 0:
            counted = part.usage.completion_tokens
            raise Refused(BROKEN, f"trtllm-serve counts {counted} tokens and gives {len(ids)}")
        if start > self._told:
            raise Refused(BROKEN, f"tokens {self._told} to {start} of the answer are missing")
        return self._delta(part, choice, ids, start)

    def _delta(
        self, part: Completion, choice: Choice, ids: Sequence[int], start: int
    ) -> TokenDelta:
        reason = choice.finish_reason
        if reason not in FINISHES and reason not in GOES_ON:
            raise Refused(BROKEN, f"the engine ended the answer with {reason!r}")
        if self._first is not None and start == 0 and ids and ids[0] != self._first:
            raise Unverified("decode's answer does not begin with prefill's token")
        finish = FINISHES.get(reason or "")
        new = list(ids[max(0, self._told - start) :])
        self._told = max(self._told, start + len(ids))
        if finish is EndReason.STOP and new and new[-1] in self._eos_ids:
            new.pop()
        said, self._said_cached = self._said_cached, True
        return TokenDelta(tuple(new), finish, (), None if said else part.cached_tokens)

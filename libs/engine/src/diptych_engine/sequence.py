"""One sequence on its way through an engine: its tokens, and when its answer ends."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.errors import ContextOverflow, Permanent, Refused, Unverified
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Stopping
from diptych_engine.matching import Matcher
from diptych_engine.port import EngineSpec, NewTokens, Phase, SequenceWork
from diptych_engine.request_port import TokenDelta
from diptych_engine.sampling import chances, check_sampling, sample

BROKEN = "engine_error"
"""Why a sequence fails whose engine does not keep to its port: elsewhere it may work."""


class StopText(Protocol):
    """Finds stop strings in the answer's text: `diptych_text.answer.AnswerText`."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        ...

    def push(self, token_ids: Sequence[int], /) -> str:
        """Add tokens."""
        ...


@dataclass(slots=True)
class LiveSequence:
    """A sequence from submission to its end."""

    work: SequenceWork
    eos_ids: frozenset[int]
    context_tokens: int
    vocab_size: int
    tokens: list[int]
    """Prompt and answer so far."""
    text: StopText | None
    matcher: Matcher | None = None
    """Follows the answer where it must match a grammar."""
    seq: int = -1
    """Its id in the engine, once admitted."""
    held: int = 0
    """DECODE: leading tokens whose KV was pinned here, and is in its place."""
    cached: int = 0
    """Leading tokens whose KV came from a cached prefix, or was restored."""
    exported: int = 0
    """KV blocks handed to the sink, or left out because nobody wants them."""
    restored: dict[int, memoryview] = field(default_factory=dict)
    """Blocks that are being restored, by index, until the sink has them too."""

    @classmethod
    def begin(
        cls, work: SequenceWork, spec: EngineSpec, answer_text: Callable[[Stopping], StopText]
    ) -> "LiveSequence":
        """A sequence whose stop state is rebuilt from `work.answer_ids`.

        Raises:
            ContextOverflow: if the prompt leaves no room for a token, or there is none.
            Permanent: if the model has no such token, or nothing can be sampled so.
            Refused: if the engine can never hold it.
        """
        if not 0 < len(work.prompt_ids) < spec.context_tokens:
            raise ContextOverflow(
                f"a prompt of 1 to {spec.context_tokens - 1} tokens fits, "
                f"this one has {len(work.prompt_ids)}"
            )
        biased = [token for token, _ in work.sampling.logit_bias]
        for ids in (work.prompt_ids, work.answer_ids, biased):
            check_ids(ids, spec.vocab_size)
        check_sampling(work.sampling)
        text = answer_text(work.stopping) if work.stopping.stop else None
        if text is not None and work.answer_ids:
            text.push(work.answer_ids)
        eos_ids = frozenset(() if work.stopping.ignore_eos else spec.eos_ids)
        tokens = [*work.prompt_ids, *work.answer_ids]
        sequence = cls(work, eos_ids, spec.context_tokens, spec.vocab_size, tokens, text)
        if sequence.cells > spec.kv_tokens:
            raise Refused(
                RefusalReason.NO_ROOM,
                f"needs {sequence.cells} KV tokens, the engine has {spec.kv_tokens}",
            )
        return sequence

    @property
    def full_length(self) -> int:
        """Most tokens it can have."""
        asked = len(self.work.prompt_ids) + self.work.stopping.max_tokens
        return min(asked, self.context_tokens)

    @property
    def cells(self) -> int:
        """KV cells to promise: a prefill leaves before its token needs one."""
        if self.work.phase is Phase.PREFILL:
            return len(self.tokens)
        return max(self.full_length, len(self.tokens))

    @property
    def answer_ids(self) -> list[int]:
        """The answer so far."""
        return self.tokens[len(self.work.prompt_ids) :]

    @property
    def left(self) -> int:
        """How many more tokens the answer may have."""
        return self.full_length - len(self.tokens)

    def decodes_from(self, position: int) -> bool:
        """Whether the token at `position` was sampled, rather than given with the work."""
        given = len(self.work.prompt_ids) + len(self.work.answer_ids)
        return self.work.phase is Phase.DECODE or position >= given

    def end(self) -> EndReason | None:
        """Why the answer is complete, if it is."""
        matcher = self.matcher
        if self.text is not None and self.text.stopped:
            return EndReason.STOP
        if matcher is not None and matcher.complete:
            return EndReason.STOP
        if self.left > 0:
            return None
        return EndReason.STOP if matcher is not None and matcher.accepting else EndReason.LENGTH

    def finished(self) -> NewTokens | None:
        """The news that nothing is left to do, if nothing is."""
        if (reason := self.end()) is None:
            return None
        index = len(self.tokens) - len(self.work.prompt_ids)
        return NewTokens(self.work.key, index, (), reason)

    def extend(self, logits: NDArray[np.float32]) -> NewTokens:
        """Sample the next token. An end-of-text token ends the answer and is not part of it.

        Raises:
            Permanent: if the logits are not finite, or the grammar cannot be followed.
        """
        answer = self.answer_ids
        token = self._next(logits, answer)
        if token is None or token in self.eos_ids:
            return NewTokens(self.work.key, len(answer), (), EndReason.STOP)
        self.tokens.append(token)
        if self.text is not None:
            self.text.push((token,))
        top = self.work.sampling.top_logprobs
        told = () if top is None else (chances(logits, token, top=top),)
        return NewTokens(self.work.key, len(answer), (token,), self.end(), told)

    def take(self, delta: TokenDelta) -> NewTokens:
        """Tokens that an engine sampled by itself. What lies beyond the answer's end is left out.

        Raises:
            Refused: they cannot be this answer's.
        """
        self._check(delta)
        index = len(self.tokens) - len(self.work.prompt_ids)
        reason: EndReason | None = None
        for token in delta.token_ids:
            if token in self.eos_ids:
                reason = EndReason.STOP
                break
            self.tokens.append(token)
            if self.text is not None:
                self.text.push((token,))
            if (reason := self.end()) is not None:
                break
        taken = len(self.tokens) - len(self.work.prompt_ids) - index
        reason = reason or delta.finish
        counted = not (self._ends_at_context or delta.recounted)
        if reason is EndReason.LENGTH and self.left > 0 and counted:
            raise Refused(BROKEN, f"the engine ended the answer {self.left} tokens too early")
        return NewTokens(
            self.work.key, index, delta.token_ids[:taken], reason, delta.logprobs[:taken]
        )

    @property
    def _ends_at_context(self) -> bool:
        """Whether the context ends the answer: engines differ in where exactly."""
        return len(self.work.prompt_ids) + self.work.stopping.max_tokens > self.context_tokens

    def _check(self, delta: TokenDelta) -> None:
        ids = delta.token_ids
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise Refused(BROKEN, f"the engine sampled {ids}, of a vocabulary of {self.vocab_size}")
        if delta.finish is not None and not delta.finish.is_finish:
            raise Refused(BROKEN, f"the engine ended the answer by {delta.finish}")
        if self.work.sampling.top_logprobs is not None and len(delta.logprobs) != len(ids):
            raise Refused(BROKEN, f"{len(ids)} tokens came with {len(delta.logprobs)} logprobs")

    def _next(self, logits: NDArray[np.float32], answer: list[int]) -> int | None:
        """The next token; None: a grammar ends the answer here."""
        work, matcher = self.work, self.matcher
        if matcher is None:
            return sample(logits, work.sampling, prompt_ids=work.prompt_ids, answer_ids=answer)
        allowed = matcher.allowed(len(logits), ignore_eos=work.stopping.ignore_eos)
        token = sample(
            logits, work.sampling, prompt_ids=work.prompt_ids, answer_ids=answer, allowed=allowed
        )
        return matcher.settle(token, left=self.left)

    def check_blocks(self) -> None:
        """See that imported KV covers all tokens but the last, and those that were held here.

        Raises:
            Unverified: if it does not, or there is no answer token to go on from.
        """
        expected = len(self.tokens) - 1
        if not self.work.answer_ids:
            raise Unverified("there is no answer token to go on from")
        at = self.held
        for block in self.work.blocks:
            if block.p0 != at or block.p1 <= at:
                raise Unverified(f"KV [{block.p0}, {block.p1}) does not follow position {at}")
            at = block.p1
        if at != expected:
            raise Unverified(f"KV covers {at} tokens, expected {expected}")


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """See that the model has every one of these tokens: an engine looks them up unchecked.

    Six million in an array take 2 ms.

    Raises:
        Permanent: if it has not; the message names the first.
    """
    if not len(ids):
        return
    if isinstance(ids, array):
        row = np.asarray(ids)
        least, most = int(row.min()), int(row.max())
    else:
        least, most = min(ids), max(ids)
    if least < 0 or most >= vocab_size:
        place, strange = next((n, i) for n, i in enumerate(ids) if not 0 <= i < vocab_size)
        raise Permanent(
            f"expected token ids from 0 to {vocab_size - 1}, saw {strange} at position {place}"
        )

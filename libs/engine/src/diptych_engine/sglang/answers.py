"""What SGLang answers: `output_ids` of the whole answer so far, or of this event alone.

Which of them depends on how the server was started (`--incremental-streaming-output`); how many
tokens there are in all is said in either case, so the new ones are the last of the list.
"""

from typing import Any

import msgspec

from diptych_contracts.errors import DiptychError, EngineGone, Refused
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.journal import Chances, EndReason
from diptych_engine.over_http.reading import from_json
from diptych_engine.over_http.refusals import refusal
from diptych_engine.request_port import TokenDelta

_FINISHES = {"stop": EndReason.STOP, "length": EndReason.LENGTH}
_NO_LOGPROB = -9999.0
_Told = tuple[float | None, int, str | None]


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _Finish | None = None
    cached_tokens: int | None = None
    output_token_logprobs: list[_Told] | None = None
    output_top_logprobs: list[list[_Told] | None] | None = None


class Answer(msgspec.Struct):
    """An event of an answer."""

    meta_info: _Meta
    output_ids: list[int] | None = None

    def failure(self) -> DiptychError | None:
        """Why it was given up: told with status 200, as the reason to finish."""
        finish = self.meta_info.finish_reason
        if finish is None or finish.type != "abort":
            return None
        if finish.status_code is None:
            return Refused(RefusalReason.NO_ROOM, f"SGLang aborted it: {finish.message}")
        return refusal(finish.status_code, finish.message.encode())


def read_answer(data: bytes) -> Answer:
    """Raises `EngineGone` if it has another form, or tells of a failure as `Answer.failure`."""
    try:
        answer: Answer = from_json(data, Answer)
    except msgspec.DecodeError as err:
        raise EngineGone(f"SGLang's answer: {err}") from err
    if (failure := answer.failure()) is not None:
        raise failure
    return answer


class Cursor:
    """Makes deltas of one answer's events.

    Args:
        eos_ids: Tokens that end an answer and are not part of it.
        ignore_eos: Whether they are tokens like others.
        logprobs: Whether logprobs were asked for.
    """

    def __init__(self, eos_ids: tuple[int, ...], *, ignore_eos: bool, logprobs: bool) -> None:
        self._eos_ids = eos_ids
        self._ignore_eos = ignore_eos
        self._logprobs = logprobs
        self._seen = 0

    def delta(self, answer: Answer) -> TokenDelta | None:
        """What is new; None: nothing. Raises `EngineGone` where tokens are missing."""
        meta = answer.meta_info
        n_new = meta.completion_tokens - self._seen
        ids = self._new(answer, n_new)
        self._seen = meta.completion_tokens
        chances = self._chances(meta, n_new) if self._logprobs else ()
        finish = None
        if meta.finish_reason is not None:
            finish = _FINISHES.get(meta.finish_reason.type)
            if finish is None:
                raise EngineGone(f"SGLang ended with {meta.finish_reason.type!r}")
        ends = finish is EndReason.STOP and not self._ignore_eos
        if ends and ids and (ids[-1] in self._eos_ids or ids[-1] == _matched(meta)):
            ids, chances = ids[:-1], chances[: n_new - 1]
        if not ids and finish is None:
            return None
        return TokenDelta(tuple(ids), finish, chances, meta.cached_tokens)

    def _new(self, answer: Answer, n_new: int) -> list[int]:
        ids = answer.output_ids
        if ids is None:
            raise EngineGone("SGLang gives no token ids (`output_ids`): it must be 0.5 or later")
        if not 0 <= n_new <= len(ids):
            raise EngineGone(f"SGLang says {n_new} tokens are new and gives {len(ids)}")
        return ids[len(ids) - n_new :]

    def _chances(self, meta: _Meta, n_new: int) -> tuple[Chances, ...]:
        told = (meta.output_token_logprobs or [])[-n_new:] if n_new else []
        top = (meta.output_top_logprobs or [])[-n_new:] if n_new else []
        if len(told) != n_new:
            raise EngineGone(f"SGLang gives {len(told)} logprobs of {n_new} tokens")
        top += [None] * (n_new - len(top))
        return tuple(
            (_pair(chosen), *sorted(map(_pair, others or ()), key=lambda c: (-c[1], c[0])))
            for chosen, others in zip(told, top, strict=True)
        )


def _pair(told: _Told) -> tuple[int, float]:
    return told[1], _NO_LOGPROB if told[0] is None else told[0]


def _matched(meta: _Meta) -> Any:
    return meta.finish_reason.matched if meta.finish_reason else None

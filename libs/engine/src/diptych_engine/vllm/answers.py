"""What vLLM answers, at either of its two doors."""

from typing import Any

import msgspec

from diptych_contracts.errors import EngineGone, Refused
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.journal import Chances, EndReason
from diptych_engine.over_http.reading import from_json
from diptych_engine.request_port import TokenDelta

_FINISHES = {"stop": EndReason.STOP, "length": EndReason.LENGTH}
_NO_LOGPROB = -9999.0
_TOKEN = "token_id:"


class _Chance(msgspec.Struct):
    logprob: float = _NO_LOGPROB
    token: str = ""
    token_id: int | None = None
    """Later versions say this instead of `token`."""
    top_logprobs: list["_Chance"] = []


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    content: list[_Chance] | None = None
    """At the token-level door, instead of the three others."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None


class Answer(msgspec.Struct):
    """A whole answer, or an event of one."""

    choices: list[_Choice]
    usage: _Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens whose KV it had, its own or fetched; None: not said."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens if details else None

    @property
    def aborted(self) -> bool:
        """Whether it was given up in the engine: then there is nothing to fetch."""
        return any(choice.finish_reason == "abort" for choice in self.choices)


class Offered(msgspec.Struct):
    """What the transfer params say that is not only for vLLM."""

    remote_num_tokens: int | None = None
    """Tokens whose KV prefill offers."""
    remote_prefill_cached_tokens: int | None = None
    """Prompt tokens that prefill had cached. Where it says so, decode repeats it as its own."""


def read_answer(data: bytes) -> Answer:
    """Raises `EngineGone` if it has another form."""
    try:
        answer: Answer = from_json(data, Answer)
    except msgspec.DecodeError as err:
        raise EngineGone(f"vLLM's answer: {err}") from err
    return answer


def offered_by(params: bytes) -> Offered:
    """What `params` say; nothing, if they are of another form."""
    try:
        told: Offered = from_json(params, Offered)
    except msgspec.DecodeError:
        return Offered()
    return told


def delta(
    answer: Answer, eos_ids: tuple[int, ...], *, ignore_eos: bool, top: int | None = None
) -> TokenDelta | None:
    """The tokens of one event; None: it has none and ends nothing.

    Args:
        answer: The event.
        eos_ids: Tokens that end an answer and are not part of it.
        ignore_eos: Whether they are tokens like others.
        top: How many likely tokens were asked for; None: logprobs were not.

    Raises:
        EngineGone: the server does not give token ids.
        Refused: the request was aborted in the engine, by somebody else.
    """
    if not answer.choices:
        return None
    choice = answer.choices[0]
    ids = choice.token_ids
    if ids is None:
        if choice.finish_reason is None:
            return None
        raise EngineGone("vLLM gives no token ids: it must know `return_token_ids` (0.11 or later)")
    finish = None
    if choice.finish_reason is not None:
        finish = _FINISHES.get(choice.finish_reason)
        if finish is None:
            raise Refused(RefusalReason.NO_ROOM, f"vLLM ended with {choice.finish_reason!r}")
    chances = (
        _chances(choice.logprobs, len(ids), top) if choice.logprobs and top is not None else ()
    )
    ends = finish is EndReason.STOP and not ignore_eos
    if ends and ids and (ids[-1] in eos_ids or ids[-1] == choice.stop_reason):
        ids, chances = ids[:-1], chances[: len(ids) - 1]
    if not ids and finish is None:
        return None
    return TokenDelta(tuple(ids), finish, chances)


def _chances(logprobs: _Logprobs, n_tokens: int, top: int) -> tuple[Chances, ...]:
    """Of each token: it, and the `top` likeliest. vLLM counts the chosen one on top of those."""
    if logprobs.content is not None:
        told = [_of_content(one) for one in logprobs.content]
    else:
        rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=False)
        told = [_of_row(*row) for row in rows]
    if len(told) != n_tokens:
        raise EngineGone(f"vLLM gives {len(told)} logprobs of {n_tokens} tokens")
    return tuple(chances[: 1 + top] for chances in told)


def _of_content(one: _Chance) -> Chances:
    def pair(chance: _Chance) -> tuple[int, float]:
        named = chance.token_id
        return (_token(chance.token) if named is None else named, chance.logprob)

    return (pair(one), *_ranked([pair(other) for other in one.top_logprobs]))


def _of_row(token: str, logprob: float | None, top: dict[str, float] | None) -> Chances:
    chosen = (_token(token), _NO_LOGPROB if logprob is None else logprob)
    return (chosen, *_ranked([(_token(name), value) for name, value in (top or {}).items()]))


def _ranked(chances: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return sorted(chances, key=lambda chance: (-chance[1], chance[0]))


def _token(name: Any) -> int:
    number = name.removeprefix(_TOKEN) if isinstance(name, str) else ""
    if number != name and number.isdecimal():
        return int(number)
    raise EngineGone(f"vLLM names a token {name!r}: expected {_TOKEN}N")

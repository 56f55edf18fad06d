"""Logprobs as clients read them: of chat completions and responses, and the older completions'."""

from collections.abc import Iterable

import msgspec

from diptych_gateway.answering.chance_trail import TokenChance
from diptych_text.codec import TextCodec

_encode = msgspec.json.Encoder().encode


class TopLogprob(msgspec.Struct):
    token: str
    """What is no whole character stands here as U+FFFD; `bytes` are exact."""
    logprob: float
    bytes: list[int]
    """Empty: a control token, which stands for no text."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Of the older completions: lists side by side."""

    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    """The chosen token is among them, so there may be one more than was asked for."""
    text_offset: list[int] = []


def token_logprobs(codec: TextCodec, told: Iterable[TokenChance]) -> list[TokenLogprob]:
    """What chat completions and responses say of tokens."""
    found = []
    for _, chances in told:
        if chances:
            (token, logprob), *top = chances
            likely = [TopLogprob(*_spelt(codec, other, p)) for other, p in top]
            found.append(TokenLogprob(*_spelt(codec, token, logprob), top_logprobs=likely))
    return found


def logprobs_json(codec: TextCodec, told: Iterable[TokenChance]) -> bytes:
    """What responses say of the tokens of one delta."""
    return _encode(token_logprobs(codec, told))


def joined(logprobs: Iterable[bytes]) -> msgspec.Raw:
    """Several lists of `logprobs_json` as one."""
    inner = (one[1:-1] for one in logprobs)
    return msgspec.Raw(b"[" + b",".join(filter(None, inner)) + b"]")


def completion_logprobs(
    codec: TextCodec, told: Iterable[TokenChance], *, first_offset: int = 0
) -> CompletionLogprobs:
    """What the older completions say; offsets count from `first_offset`."""
    found = CompletionLogprobs()
    for offset, chances in told:
        if chances:
            (token, logprob), *_ = chances
            found.tokens.append(_name(codec, token))
            found.token_logprobs.append(logprob)
            found.top_logprobs.append({_name(codec, other): p for other, p in chances})
            found.text_offset.append(first_offset + offset)
    return found


def _spelt(codec: TextCodec, token: int, logprob: float) -> tuple[str, float, list[int]]:
    if codec.is_control(token):
        return codec.control_text(token), logprob, []
    data = codec.token_bytes(token)
    return data.decode("utf-8", "replace"), logprob, list(data)


def _name(codec: TextCodec, token: int) -> str:
    """Its text; no two tokens of the older form may look alike, so odd bytes are spelt out."""
    if codec.is_control(token):
        return codec.control_text(token)
    data = codec.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

"""What a call says of single tokens: how many answers, logprobs, and bias."""

import re

import msgspec

from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.spans import LOGIT_BIAS_SPAN
from diptych_gateway.judging.bodies import ABSENT, decode_as
from diptych_gateway.judging.harmless import shown

MAX_CHOICES = 8
"""Answers to one prompt."""
MAX_BIASED = 1024
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
_BIAS_BYTES = 64 * 1024
"""More than 1,024 entries, each with a generous number."""
_TOKEN = re.compile(r"0|[1-9]\d{0,9}")
_bias_decoder = msgspec.json.Decoder(dict[str, float] | None)

Bias = tuple[tuple[int, float], ...]


def logit_bias(given: msgspec.Raw) -> Bias:
    """What is to be added to logits, by token.

    Raises:
        InvalidRequest: names the entry; whether there is such a token is judged later.
    """
    if given == ABSENT:
        return ()
    if len(bytes(given)) > _BIAS_BYTES:
        raise _bad_bias(f"expected at most {_BIAS_BYTES} bytes, saw {len(bytes(given))}")
    found = decode_as(_bias_decoder, given, at="logit_bias") or {}
    if len(found) > MAX_BIASED:
        raise _bad_bias(f"expected at most {MAX_BIASED} tokens, saw {len(found)}")
    for token, bias in found.items():
        if not _TOKEN.fullmatch(token):
            raise _bad_bias(f"expected token ids as keys, saw {shown(token)}")
        if bias not in LOGIT_BIAS_SPAN:
            raise _bad_bias(f"expected numbers {LOGIT_BIAS_SPAN}, saw {bias:g} for {token}")
    return tuple((int(token), bias) for token, bias in found.items() if bias)


def check_bias(bias: Bias, card: ModelCard) -> None:
    """Raise `InvalidRequest` for a token that the model does not have."""
    for token, _ in bias:
        if token >= card.vocab_size:
            raise _bad_bias(f"expected token ids below {card.vocab_size}, saw {token}")


def _bad_bias(text: str) -> InvalidRequest:
    return InvalidRequest(f"'logit_bias': {text}", param="logit_bias")


def top_logprobs(logprobs: bool | None, top: int | None) -> int | None:
    """How many likely tokens are told beside each chosen one; None: nothing is told.

    Raises:
        InvalidRequest: some are asked for, and logprobs are not.
    """
    if logprobs:
        return top or 0
    if top:
        text = "'top_logprobs' is only allowed together with 'logprobs': true"
        raise InvalidRequest(text, param="top_logprobs")
    return None


def check_choices(count: int, *, resume: bool) -> None:
    """Raise `InvalidRequest` where several answers are to be taken up again later."""
    if count > 1 and resume:
        raise InvalidRequest(
            f"an answer of one choice can be resumed, saw {count} together with "
            "'x-diptych-resume: 1'",
            param="n",
            code="not_resumable",
        )

"""Numbers in their ranges, and how tokens are chosen by them."""

from typing import Any

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar, Sampling
from diptych_contracts.spans import SAMPLING_SPANS, NumberSpan
from diptych_gateway.judging.bodies import CommonBody
from diptych_gateway.judging.harmless import shown
from diptych_gateway.judging.token_checks import MAX_CHOICES, MAX_TOP_LOGPROBS

_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1

_SPANS = {
    **SAMPLING_SPANS,
    "max_tokens": NumberSpan(1, 2**31 - 1),
    "max_completion_tokens": NumberSpan(1, 2**31 - 1),
    "max_output_tokens": NumberSpan(1, 2**31 - 1),
    "n": NumberSpan(1, MAX_CHOICES),
    "top_logprobs": NumberSpan(0, MAX_TOP_LOGPROBS),
}


def check_numbers(body: CommonBody) -> None:
    """Raise `InvalidRequest` for a number out of its range, or an empty model."""
    if not body.model:
        raise InvalidRequest("expected a model's id, saw an empty string", param="model")
    for name, span in _SPANS.items():
        check_span(name, getattr(body, name, None), span)


def check_span(name: str, value: float | None, span: NumberSpan) -> None:
    """Raise `InvalidRequest` for a number out of `span`."""
    if value is not None and value not in span:
        raise InvalidRequest(f"'{name}': expected {span}, saw {shown(value)}", param=name)


def sampling(body: CommonBody, grammar: Grammar | None = None) -> Sampling:
    """How tokens are chosen, as far as `body` says, within `grammar`."""
    seed = body.seed
    if seed is not None and not _SEED_MIN <= seed <= _SEED_MAX:
        raise InvalidRequest(
            f"'seed': expected a signed 64-bit integer, saw {shown(seed)}", param="seed"
        )
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "seed": seed,
        "grammar": grammar,
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})

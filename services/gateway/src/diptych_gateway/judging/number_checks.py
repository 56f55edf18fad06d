"""Numbers in their ranges, and how tokens are chosen by them."""

from dataclasses import dataclass
from typing import Any

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar, Sampling
from diptych_gateway.judging.bodies import CommonBody
from diptych_gateway.judging.harmless import shown
from diptych_gateway.judging.token_checks import MAX_CHOICES, MAX_TOP_LOGPROBS

_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """A range of numbers; `open_low` leaves its lower end out."""

    low: float
    high: float | None = None
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        low_ok = value > self.low if self.open_low else value >= self.low
        return low_ok and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low}"
        return f"{'more than' if self.open_low else 'from'} {self.low}, up to {self.high}"


_SPANS = {
    "temperature": Span(0, 2),
    "top_p": Span(0, 1, open_low=True),
    "top_k": Span(0, 2**31 - 1),
    "min_p": Span(0, 1),
    "presence_penalty": Span(-2, 2),
    "frequency_penalty": Span(-2, 2),
    "repetition_penalty": Span(0.01, 2),  # 1e-300 would make infinities of logits
    "max_tokens": Span(1, 2**31 - 1),
    "max_completion_tokens": Span(1, 2**31 - 1),
    "max_output_tokens": Span(1, 2**31 - 1),
    "n": Span(1, MAX_CHOICES),
    "top_logprobs": Span(0, MAX_TOP_LOGPROBS),
}


def check_numbers(body: CommonBody) -> None:
    """Raise `InvalidRequest` for a number out of its range, or an empty model."""
    if not body.model:
        raise InvalidRequest("expected a model's id, saw an empty string", param="model")
    for name, span in _SPANS.items():
        check_span(name, getattr(body, name, None), span)


def check_span(name: str, value: float | None, span: Span) -> None:
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

"""Whether the model's engine can obey what a call asks for: nothing is silently left out."""

from collections.abc import Callable, Mapping

from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar, Sampling
from diptych_gateway.judging.checking import Call

_SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_FREE = Sampling()

_ASKED: Mapping[str, Callable[[Call], bool]] = {
    "seed": lambda call: call.seeded,
    "logprobs": lambda call: call.sampling.top_logprobs is not None,
    "top_logprobs": lambda call: bool(call.sampling.top_logprobs),
    "stop": lambda call: bool(call.stop),
    "ignore_eos": lambda call: call.ignore_eos,
    "response_format": lambda call: call.sampling.grammar is not None,
    "tool_choice": lambda call: call.tooling is not None and bool(call.tooling.must),
}


def check_supported(call: Call, card: ModelCard) -> None:
    """Raise `InvalidRequest` for the first parameter that the engine of `card` cannot obey.

    A value that asks for nothing, the default, is no reason: it is what every engine does.
    """
    for name in card.unsupported:
        if _asks_for(call, name):
            param = name
            if name == "response_format":  # other endpoints call it `text`
                param = call.grammar_param.split(".", 1)[0]
            raise _unsupported(param, card)


def check_plan(grammar: Grammar, card: ModelCard, *, param: str) -> None:
    """The same of a grammar that was made of tools, or of tools and a document."""
    if grammar.kind != "json_schema" and "tool_choice" in card.unsupported:
        raise _unsupported(param, card)


def _asks_for(call: Call, name: str) -> bool:
    if name in _SAMPLED:
        return bool(getattr(call.sampling, name) != getattr(_FREE, name))
    asked = _ASKED.get(name)
    return asked is not None and asked(call)


def _unsupported(param: str, card: ModelCard) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}': the engine that serves '{card.model}' does not support it; "
        "leave it out, or give it the value that asks for nothing",
        param=param,
        code="unsupported_parameter",
    )

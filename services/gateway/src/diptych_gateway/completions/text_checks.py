"""The body of `POST /v1/completions`: its types, and what it means."""

import re
from array import array
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.spans import NumberSpan
from diptych_gateway.judging.bodies import ABSENT, CommonBody, decode_as
from diptych_gateway.judging.checking import (
    Call,
    Prompt,
    forced,
    include_usage,
    metadata,
    stop_strings,
)
from diptych_gateway.judging.class_checks import priority_class
from diptych_gateway.judging.harmless import only
from diptych_gateway.judging.number_checks import check_numbers, check_span, sampling
from diptych_gateway.judging.structured import response_format
from diptych_gateway.judging.token_checks import MAX_COMPLETION_LOGPROBS, check_choices, logit_bias

MAX_PROMPTS = 32
MAX_ALL_CHOICES = 64
"""Of all prompts of a call together."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

_FORMS = "text, a list of texts, token ids, or a list of lists of token ids"
_BEGINNING = re.compile(rb"[ \t\r\n]*(\[?)[ \t\r\n]*(.)", re.DOTALL)
T = TypeVar("T")
_text_decoder = msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[int])
_all_ids_decoder = msgspec.json.Decoder(list[list[int]])


class CompletionBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    prompt: msgspec.Raw
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None
    logit_bias: msgspec.Raw = ABSENT
    echo: bool | None = None
    response_format: msgspec.Raw = ABSENT
    # Accepted only with the value that asks for nothing.
    best_of: int | None = None
    suffix: str | None = None


_decoder = msgspec.json.Decoder(CompletionBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(Call):
    """A call of completions; `prompt` is the first of `prompts`."""

    prompts: tuple[Prompt, ...]
    echo: bool
    stream: bool
    include_usage: bool


def decode_completion(data: bytes) -> CompletionBody:
    """`data` as a body. Raises `InvalidRequest`, see `bodies.decode_as`."""
    return decode_as(_decoder, data)


def check_completion(body: CompletionBody, *, resume: bool = False) -> CompletionCall:
    """The call that `body` describes.

    Raises:
        InvalidRequest: names the parameter, and says what was expected and seen.
    """
    check_numbers(body)
    check_span("logprobs", body.logprobs, NumberSpan(0, MAX_COMPLETION_LOGPROBS))
    _supported(body)
    metadata(body)
    structure = response_format(body.response_format)
    prompts, choices = _prompts(body.prompt), body.n or 1
    if len(prompts) * choices > MAX_ALL_CHOICES:
        raise InvalidRequest(
            f"expected at most {MAX_ALL_CHOICES} choices of all prompts together, "
            f"saw {len(prompts)} prompts with 'n': {choices}",
            param="n",
        )
    check_choices(len(prompts) * choices, resume=resume)
    return CompletionCall(
        model=body.model,
        messages=[],
        messages_param="prompt",
        prompt=prompts[0],
        prompts=prompts,
        choices=choices,
        sampling=msgspec.structs.replace(
            sampling(body, structure.grammar),
            logit_bias=logit_bias(body.logit_bias),
            top_logprobs=body.logprobs,
        ),
        grammar_param=structure.param,
        seeded=body.seed is not None,
        stop=stop_strings(body.stop),
        ignore_eos=bool(body.ignore_eos),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        forced=forced(body),
        priority_class=priority_class(body),
        resume=resume,
        echo=bool(body.echo),
        stream=bool(body.stream),
        include_usage=include_usage(body),
    )


def _supported(body: CompletionBody) -> None:
    only("best_of", body.best_of, (1,))
    only("suffix", body.suffix, ("",))
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "'echo' is not supported together with 'logprobs': prompts have none here",
            param="echo",
            code="unsupported_parameter",
        )


def _prompts(given: msgspec.Raw) -> tuple[Prompt, ...]:
    found = _BEGINNING.match(bytes(given))
    listed, first = (found[1], found[2]) if found else (b"", b"")
    match listed, first:
        case b"", b'"':
            return (Prompt(decode_as(_text_decoder, given, at="prompt")),)
        case b"[", b'"':
            return tuple(
                Prompt(text) for text in _few(decode_as(_texts_decoder, given, at="prompt"))
            )
        case b"[", b"[":
            lists = _few(decode_as(_all_ids_decoder, given, at="prompt"))
            return tuple(_of_ids(f"prompt[{n}]", ids) for n, ids in enumerate(lists))
        case b"[", b"]":
            raise InvalidRequest(f"'prompt': expected {_FORMS}, saw none", param="prompt")
        case b"[", _:
            return (_of_ids("prompt", decode_as(_ids_decoder, given, at="prompt")),)
    text = f"'prompt': expected {_FORMS}"
    raise InvalidRequest(text, param="prompt", code="invalid_type")


def _few(prompts: list[T]) -> list[T]:
    if len(prompts) > MAX_PROMPTS:
        text = f"'prompt': expected at most {MAX_PROMPTS} prompts, saw {len(prompts)}"
        raise InvalidRequest(text, param="prompt")
    return prompts


def _of_ids(at: str, ids: list[int]) -> Prompt:
    """Token ids as a prompt; that there are such tokens is judged when the model is known."""
    if not ids:
        raise InvalidRequest(f"'{at}': expected at least one token id, saw none", param=at)
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= 2**32:
        seen = lowest if lowest < 0 else highest
        raise InvalidRequest(f"'{at}': expected token ids, saw {seen}", param=at)
    return Prompt(ids=array("I", ids), highest=highest)

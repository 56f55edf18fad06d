"""Bodies as clients write them, types only: what every one shares, and chat completions' own.

A field that is missing here is unknown and refused by name. Values are judged in `checking`.
"""

import re
from typing import TypeVar

import msgspec

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.judging.successors import hint

ABSENT = msgspec.Raw(b"null")
"""A parameter not given. What may hold anything is kept as it was written until it is looked at:
four megabytes of `[[],[],…` would take a second to become lists, and stop every other thread."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    # What earlier answers carry when a client sends them back; harmless while empty.
    refusal: msgspec.Raw = ABSENT
    annotations: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    # What an assistant called and thought, and which call a tool's result answers.
    tool_calls: msgspec.Raw = ABSENT
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class DiptychOptions(msgspec.Struct, forbid_unknown_fields=True):
    mode: str | None = None
    link: str | None = None
    path: str | None = None
    priority_class: str | None = None
    """Instead of what `service_tier` says."""
    events: bool | None = None
    """Whether our own events are sent too, on a WebSocket of the Responses API."""


class CommonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every generating endpoint takes, with the same meaning."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's, as other servers name them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    diptych: DiptychOptions | None = None
    # They do not change the answer.
    user: str | None = None
    metadata: msgspec.Raw = ABSENT
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    messages: list[ChatMessage]
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    reasoning_effort: str | None = None
    # Judged in `tooling`.
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: msgspec.Raw = ABSENT
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    # Accepted only with the value that asks for nothing (`checking.HARMLESS`).
    store: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    prediction: msgspec.Raw = ABSENT
    verbosity: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT


T = TypeVar("T")


class TierBody(msgspec.Struct):
    """What a body says of its class; all else is skipped."""

    service_tier: msgspec.Raw = ABSENT
    diptych: msgspec.Raw = ABSENT


_tier_decoder = msgspec.json.Decoder(TierBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)
_metadata_decoder = msgspec.json.Decoder(dict[str, str] | None)
_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_KINDS = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_SHOWN_CHARS = 80


def decode(data: bytes) -> ChatBody:
    """`data` as a body of chat completions. Raises `InvalidRequest`, see `decode_as`."""
    return decode_as(_chat_decoder, data)


def decode_tier(data: bytes) -> TierBody:
    """What `data` says of its class; nothing if it is no JSON object."""
    try:
        return _tier_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return TierBody()


def decode_metadata(data: msgspec.Raw) -> dict[str, str]:
    """`data` as `metadata`."""
    return decode_as(_metadata_decoder, data, at="metadata") or {}


def decode_as(
    decoder: msgspec.json.Decoder[T], data: bytes | str | msgspec.Raw, *, at: str = ""
) -> T:
    """`data` as what `decoder` makes of it; `at` is where it stands in the body.

    Raises:
        InvalidRequest: names the parameter, and says what was expected and seen.
    """
    if not data:
        raise InvalidRequest("expected a JSON object, the body is empty", code="invalid_json")
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as err:
        raise _misfit(str(err), at) from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        hint = _surrogate_hint(data)
        raise InvalidRequest(f"expected JSON in UTF-8: {err}{hint}", code="invalid_json") from err
    except RecursionError as err:
        raise InvalidRequest("the JSON is nested too deeply", code="invalid_json") from err


def as_text(data: msgspec.Raw, *, at: str) -> str:
    """`data` as it was written; what nobody decoded may be no text at all.

    Raises:
        InvalidRequest: it is not in UTF-8.
    """
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as err:
        message = f"'{at}': expected JSON in UTF-8: {err}"
        raise InvalidRequest(message, param=at, code="invalid_json") from err


def _misfit(message: str, at: str) -> InvalidRequest:
    found = _AT.match(message)
    what, path = (found["what"], found["path"]) if found else (message, "")
    path = _join(at, path) if path else at
    if unknown := _UNKNOWN.match(what):
        param = _join(path, unknown["name"][:_SHOWN_CHARS])
        text = f"unknown parameter '{param}'{hint(param)}"
        return InvalidRequest(text, param=param, code="unknown_parameter")
    if missing := _MISSING.match(what):
        param = _join(path, missing["name"])
        return InvalidRequest(
            f"'{param}' is required and was not given",
            param=param,
            code="missing_required_parameter",
        )
    where = f"'{path}': " if path else ""
    text = what[:1].lower() + _KINDS.sub(_in_words, what[1:]).replace("`", "")
    return InvalidRequest(f"{where}{text}", param=path or None, code="invalid_type")


def _in_words(kinds: re.Match[str]) -> str:
    return " or ".join(_WORDS.get(kind, kind) for kind in kinds[1].split(" | "))


def _join(path: str, name: str) -> str:
    return f"{path}{'' if name.startswith('[') else '.'}{name}" if path else name


_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def _surrogate_hint(data: bytes | str | msgspec.Raw) -> str:
    plain = data.encode("utf-8", "replace") if isinstance(data, str) else bytes(data)
    if _ESCAPED_SURROGATE.search(plain):
        return " (is there a lone surrogate, half of a character, behind a \\u?)"
    return ""

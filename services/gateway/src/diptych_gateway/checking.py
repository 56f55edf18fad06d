"""From a body's types to a request's meaning: every value is judged here, none is ignored."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.requests import Forced, PriorityClass
from diptych_contracts.sampling import Sampling
from diptych_gateway.bodies import (
    ChatBody,
    ChatMessage,
    CommonBody,
    ContentPart,
    StreamOptions,
    decode_metadata,
    decode_tier,
)

MAX_MESSAGES = 2048
"""Also of the parts of one message; a conversation's history counts."""
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
_METADATA_BYTES = 64 * 1024
"""More than the longest metadata, every character escaped."""
_HARMLESS_BYTES = 1024
"""More than any of the harmless values, with generous spaces."""
_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TIERS = {
    "auto": PriorityClass.INTERACTIVE,
    "default": PriorityClass.INTERACTIVE,
    "flex": PriorityClass.BATCH,
}

_DEFAULT_CLASS = PriorityClass.INTERACTIVE
_PEEKED_BYTES = 64 * 1024
"""Above it, looking would cost what a place is there to limit."""
_NAMED_CLASS = re.compile(rf'"priority_class"\s*:\s*"({"|".join(PriorityClass)})"'.encode())

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""What these parameters may say while they are not supported: nothing that changes an answer."""

_EMPTY_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning_content": ("",),
}


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
            return f"at least {self.low:g}"
        return f"{'more than' if self.open_low else 'from'} {self.low:g}, up to {self.high:g}"


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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a client wants generated, judged."""

    model: str
    messages: list[dict[str, str]]
    messages_param: str = "messages"
    """What the client calls them."""
    sampling: Sampling
    seeded: bool
    stop: tuple[str, ...] = ()
    ignore_eos: bool
    max_tokens: int | None
    forced: Forced
    priority_class: PriorityClass
    resume: bool = False
    background: bool = False

    @property
    def text_chars(self) -> int:
        """How much text there is to tokenize."""
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(Call):
    """A call of chat completions."""

    stream: bool
    include_usage: bool


def check(body: ChatBody, *, resume: bool = False) -> ChatCall:
    """The call that `body` describes.

    Raises:
        InvalidRequest: names the parameter, and says what was expected and seen.
    """
    check_numbers(body)
    _harmless(body)
    metadata(body)
    return ChatCall(
        model=body.model,
        messages=_messages(body.messages),
        sampling=sampling(body),
        seeded=body.seed is not None,
        stop=_stop(body.stop),
        ignore_eos=bool(body.ignore_eos),
        max_tokens=_max_tokens(body),
        forced=forced(body),
        priority_class=priority_class(body),
        resume=resume,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
    )


def check_numbers(body: CommonBody) -> None:
    """Raise `InvalidRequest` for a number out of its range, or an empty model."""
    if not body.model:
        raise InvalidRequest("expected a model's id, saw an empty string", param="model")
    for name, span in _SPANS.items():
        _in_span(name, getattr(body, name, None), span)


def _in_span(name: str, value: float | None, span: Span) -> None:
    if value is not None and value not in span:
        raise InvalidRequest(f"'{name}': expected {span}, saw {shown(value)}", param=name)


def _harmless(body: ChatBody) -> None:
    if body.n not in (None, 1):
        raise unsupported("n", body.n, (1,))
    for name, allowed in HARMLESS.items():
        only(name, getattr(body, name), allowed)


def only(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise `InvalidRequest` unless `value` (as JSON or plain) is absent or one of `allowed`."""
    if isinstance(value, msgspec.Raw):
        value = _plain(value)
    if value is None or any(value == a and type(value) is type(a) for a in allowed):
        return
    raise unsupported(name, value, allowed)


class _Long(str):
    """JSON that is too long to be looked at."""

    __slots__ = ()
    __repr__ = str.__str__


def _plain(value: msgspec.Raw) -> Any:
    data = bytes(value)
    if len(data) <= _HARMLESS_BYTES:
        with suppress(RecursionError, msgspec.DecodeError):
            return msgspec.json.decode(data)
    return _Long(data[:_HARMLESS_BYTES].decode("utf-8", "replace"))


def unsupported(name: str, value: Any, allowed: tuple[Any, ...]) -> InvalidRequest:
    """What a client is told about a parameter that is not supported."""
    options = " or ".join([*(repr(a) for a in allowed), "nothing"])
    message = f"'{name}' is not supported: expected {options}, saw {shown(value)}"
    return InvalidRequest(message, param=name, code="unsupported_parameter")


def shown(value: Any) -> str:
    """`value` for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _messages(messages: list[ChatMessage]) -> list[dict[str, str]]:
    if not messages:
        raise InvalidRequest("expected at least one message, saw none", param="messages")
    check_count(len(messages), "messages", param="messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def check_count(count: int, what: str, *, param: str) -> None:
    """Raise `InvalidRequest` for more messages, or parts of one, than anybody needs."""
    if count > MAX_MESSAGES:
        raise InvalidRequest(f"expected at most {MAX_MESSAGES} {what}, saw {count}", param=param)


def _message(at: str, message: ChatMessage) -> dict[str, str]:
    role = ROLES.get(message.role)
    if role is None:
        expected = ", ".join(ROLES)
        raise InvalidRequest(
            f"'{at}.role': expected one of {expected}, saw {shown(message.role)}",
            param=f"{at}.role",
        )
    for name, allowed in _EMPTY_IN_MESSAGES.items():
        only(f"{at}.{name}", getattr(message, name), allowed)
    plain = {"role": role, "content": _content(f"{at}.content", message.content)}
    return plain if message.name is None else {**plain, "name": message.name}


def _content(at: str, content: str | list[ContentPart] | None) -> str:
    if content is None:
        raise InvalidRequest(f"'{at}': expected text, saw none", param=at)
    if isinstance(content, str):
        return content
    return joined(at, content, ("text",))


def joined(at: str, parts: list[ContentPart], kinds: tuple[str, ...]) -> str:
    """The text of `parts`, which must be of one of `kinds`.

    Raises:
        InvalidRequest: names the part.
    """
    if not parts:
        raise InvalidRequest(f"'{at}': expected at least one part, saw none", param=at)
    check_count(len(parts), f"parts in '{at}'", param=at)
    return "".join(_part(f"{at}[{i}]", part, kinds) for i, part in enumerate(parts))


def _part(at: str, part: ContentPart, kinds: tuple[str, ...]) -> str:
    if part.type not in kinds:
        expected = " or ".join(repr(kind) for kind in kinds)
        raise InvalidRequest(
            f"'{at}': expected a part of type {expected}, saw {shown(part.type)}: "
            "this server reads text only",
            param=at,
            code="unsupported_content",
        )
    if part.text is None:
        raise InvalidRequest(f"'{at}.text': expected text, saw none", param=f"{at}.text")
    return part.text


def sampling(body: CommonBody) -> Sampling:
    """How tokens are chosen, as far as `body` says."""
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
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def metadata(body: CommonBody) -> dict[str, str]:
    """The notes a client made; they do not change the answer.

    Raises:
        InvalidRequest: there are more than OpenAI allows.
    """
    if len(bytes(body.metadata)) > _METADATA_BYTES:
        raise InvalidRequest(
            f"'metadata': expected at most {_METADATA_BYTES} bytes", param="metadata"
        )
    found = decode_metadata(body.metadata)
    longest_key = max(map(len, found), default=0)
    longest = max(map(len, found.values()), default=0)
    if len(found) > MAX_METADATA or longest_key > MAX_METADATA_KEY:
        raise InvalidRequest(
            f"'metadata': expected at most {MAX_METADATA} keys of {MAX_METADATA_KEY} characters, "
            f"saw {len(found)} of up to {longest_key}",
            param="metadata",
        )
    if longest > MAX_METADATA_VALUE:
        raise InvalidRequest(
            f"'metadata': expected values of at most {MAX_METADATA_VALUE} characters, "
            f"saw {longest}",
            param="metadata",
        )
    return found


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOPS:
        raise InvalidRequest(
            f"'stop': expected at most {MAX_STOPS} strings, saw {len(strings)}", param="stop"
        )
    if "" in strings:
        raise InvalidRequest("'stop': expected text, saw an empty string", param="stop")
    if (longest := max(map(len, strings), default=0)) > MAX_STOP_CHARS:
        raise InvalidRequest(
            f"'stop': expected at most {MAX_STOP_CHARS} characters each, saw {longest}",
            param="stop",
        )
    return tuple(strings)


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"'max_tokens' and 'max_completion_tokens' say different things: {old} and {new}",
            param="max_completion_tokens",
        )
    return new if new is not None else old


def forced(body: CommonBody) -> Forced:
    """The path `body` insists on."""
    options = body.diptych
    if options is None:
        return Forced()
    match options.link:
        case None | "shm" | "tcp" as link:
            return Forced(mode=options.mode, link=link)
        case other:
            raise InvalidRequest(
                f"'diptych.link': expected 'shm' or 'tcp', saw {shown(other)}",
                param="diptych.link",
            )


def priority_class(body: CommonBody) -> PriorityClass:
    """The class that `diptych.priority_class` or else `service_tier` names."""
    tier = body.service_tier
    own = None if body.diptych is None else body.diptych.priority_class
    if tier is not None and tier not in _TIERS:
        raise unsupported("service_tier", tier, tuple(_TIERS))
    if own is not None:
        return own
    return _DEFAULT_CLASS if tier is None else _TIERS[tier]


def likely_class(data: bytes) -> PriorityClass:
    """The class of a small body that has no place yet; what is wrong with it is told later."""
    if len(data) > _PEEKED_BYTES:
        return _DEFAULT_CLASS
    tier = decode_tier(data)
    for named in _NAMED_CLASS.finditer(bytes(tier.diptych)):
        return PriorityClass(named[1].decode())
    return _TIERS.get(bytes(tier.service_tier).decode("latin-1").strip('"'), _DEFAULT_CLASS)


def _include_usage(body: ChatBody) -> bool:
    options: StreamOptions | None = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidRequest(
            "'stream_options' is only allowed together with 'stream': true", param="stream_options"
        )
    return bool(options.include_usage)

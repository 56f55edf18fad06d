"""From a body's types to a request's meaning: every value is judged here, none is ignored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.requests import Forced, KvPath, Mode, PriorityClass
from diptych_contracts.sampling import Sampling
from diptych_gateway.judging.bodies import ChatBody, CommonBody, StreamOptions, decode_metadata
from diptych_gateway.judging.class_checks import priority_class
from diptych_gateway.judging.harmless import HARMLESS, one_of, only, shown
from diptych_gateway.judging.message_checks import conversation, text_chars
from diptych_gateway.judging.number_checks import check_numbers, sampling
from diptych_gateway.judging.structured import response_format
from diptych_gateway.judging.token_checks import check_choices, logit_bias, top_logprobs
from diptych_gateway.judging.tooling import Tooling, offered

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
_METADATA_BYTES = 64 * 1024
"""More than the longest metadata, every character escaped."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model goes on from: text, or token ids."""

    text: str = ""
    ids: Sequence[int] | None = None
    highest: int = 0
    """Of `ids`; none is negative."""
    chat: bool = False
    """Whether it was made of messages: then its answer may have parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a client wants generated, judged."""

    model: str
    messages: list[dict[str, Any]]
    messages_param: str = "messages"
    """What the client calls them."""
    prompt: Prompt | None = None
    """Instead of messages."""
    choices: int = 1
    """How many answers."""
    sampling: Sampling
    grammar_param: str = "response_format"
    """Where `sampling.grammar` comes from."""
    seeded: bool
    stop: tuple[str, ...] = ()
    ignore_eos: bool
    max_tokens: int | None
    forced: Forced
    priority_class: PriorityClass
    resume: bool = False
    background: bool = False
    tooling: Tooling | None = None
    """The tools the model is told of."""
    effort: str | None = None
    effort_param: str = "reasoning_effort"

    @property
    def text_chars(self) -> int:
        """How much text there is to tokenize."""
        if self.prompt is not None:
            return len(self.prompt.text)
        tools = self.tooling.chars if self.tooling is not None else 0
        return text_chars(self.messages) + tools


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
    check_choices(body.n or 1, resume=resume)
    _harmless(body)
    no_events(body)
    metadata(body)
    structure = response_format(body.response_format)
    return ChatCall(
        model=body.model,
        messages=conversation(body.messages),
        choices=body.n or 1,
        sampling=msgspec.structs.replace(
            sampling(body, structure.grammar),
            logit_bias=logit_bias(body.logit_bias),
            top_logprobs=top_logprobs(body.logprobs, body.top_logprobs),
        ),
        grammar_param=structure.param,
        seeded=body.seed is not None,
        stop=stop_strings(body.stop),
        ignore_eos=bool(body.ignore_eos),
        max_tokens=_max_tokens(body),
        forced=forced(body),
        priority_class=priority_class(body),
        resume=resume,
        tooling=offered(body.tools, body.tool_choice, body.parallel_tool_calls).tooling,
        effort=body.reasoning_effort,
        stream=bool(body.stream),
        include_usage=include_usage(body),
    )


def _harmless(body: ChatBody) -> None:
    for name, allowed in HARMLESS.items():
        only(name, getattr(body, name), allowed)


def metadata(body: CommonBody) -> dict[str, str]:
    """The notes a client made; they do not change the answer.

    Raises:
        InvalidRequest: there are more than OpenAI allows.
    """
    return check_metadata(body.metadata)


def check_metadata(given: msgspec.Raw) -> dict[str, str]:
    """The same of a body's `metadata`. Raises `InvalidRequest`."""
    if len(bytes(given)) > _METADATA_BYTES:
        raise InvalidRequest(
            f"'metadata': expected at most {_METADATA_BYTES} bytes", param="metadata"
        )
    found = decode_metadata(given)
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


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """What ends an answer. Raises `InvalidRequest`."""
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
    mode = None if options.mode is None else one_of(Mode, options.mode, "diptych.mode")
    path = None if options.path is None else one_of(KvPath, options.path, "diptych.path")
    if mode is not None and path is not None and (mode is Mode.LOCAL) != (path is KvPath.COLOCATED):
        raise InvalidRequest(
            f"'diptych.mode' and 'diptych.path' say different things: {mode} and {path}",
            param="diptych.path",
        )
    match options.link:
        case None | "shm" | "nixl" | "tcp" as link:
            return Forced(mode=mode, link=link, path=path)
        case other:
            raise InvalidRequest(
                f"'diptych.link': expected 'shm', 'nixl' or 'tcp', saw {shown(other)}",
                param="diptych.link",
            )


def no_events(body: CommonBody) -> None:
    """Raise `InvalidRequest` where our own events are asked for, but not sent."""
    if body.diptych is not None:
        only("diptych.events", body.diptych.events, (False,))


def include_usage(body: CommonBody) -> bool:
    """Whether a stream ends with its usage. Raises `InvalidRequest` if there is no stream."""
    options: StreamOptions | None = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidRequest(
            "'stream_options' is only allowed together with 'stream': true", param="stream_options"
        )
    return bool(options.include_usage)

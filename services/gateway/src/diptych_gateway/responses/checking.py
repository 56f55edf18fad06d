"""From the types of a Responses body to its meaning; values shared with chat are judged there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.requests import Forced, PriorityClass
from diptych_contracts.responses import StoredMessage
from diptych_contracts.sampling import Sampling
from diptych_gateway.judging.bodies import ABSENT
from diptych_gateway.judging.checking import Call, forced, metadata, no_events
from diptych_gateway.judging.class_checks import priority_class
from diptych_gateway.judging.harmless import only, unsupported
from diptych_gateway.judging.message_checks import check_count, check_results
from diptych_gateway.judging.number_checks import check_numbers, sampling
from diptych_gateway.judging.structured import Structure, text_settings
from diptych_gateway.judging.tooling import Offered, offered
from diptych_gateway.responses.bodies import (
    CreateFrame,
    ReasoningOptions,
    ResponseBody,
    decode_include,
)
from diptych_gateway.responses.input_items import as_messages, read_item

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
}
"""What these may say while they are not supported: nothing that changes an answer."""
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""The latter asks for something beside reasoning, of which there is none."""


_READ = ("metadata", "include", "text", "tools", "tool_choice", "parallel_tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall:
    """What a client wants, judged, but for the turns before it."""

    body: ResponseBody
    input: tuple[StoredMessage, ...]
    metadata: dict[str, str]
    sampling: Sampling
    structure: Structure
    forced: Forced
    priority_class: PriorityClass
    store: bool
    background: bool
    stream: bool
    resume: bool
    offered: Offered
    effort: str | None
    events: bool = False
    """Whether our own events are wanted too."""

    def generation(self, history: tuple[StoredMessage, ...]) -> Call:
        """What is to be generated after `history`.

        Instructions come first and are this turn's alone: a later turn does not inherit them.
        """
        body = self.body
        instructions = body.instructions
        first = () if instructions is None else (StoredMessage(role="system", text=instructions),)
        count = len(first) + len(history) + len(self.input)
        check_count(count, "messages in the whole conversation", param="input")
        messages = as_messages((*first, *history, *self.input))
        if not messages:
            raise InvalidRequest(
                "expected at least one message in the whole conversation, saw none", param="input"
            )
        check_results(messages, "input")
        return Call(
            model=body.model,
            messages=messages,
            messages_param="input",
            tooling=self.offered.tooling,
            effort=self.effort,
            effort_param="reasoning.effort",
            sampling=self.sampling,
            grammar_param=self.structure.param,
            seeded=body.seed is not None,
            ignore_eos=bool(body.ignore_eos),
            max_tokens=body.max_output_tokens,
            forced=self.forced,
            priority_class=self.priority_class,
            resume=self.resume,
            background=self.background,
        )


def check_response(body: ResponseBody, *, resume: bool = False) -> ResponseCall:
    """The call that a body over HTTP describes; see `checked`."""
    no_events(body)
    return checked(body, resume=resume)


def checked(body: ResponseBody, *, resume: bool) -> ResponseCall:
    """The call that `body` describes; `resume` if its client asked for a grace by header.

    Raises:
        InvalidRequest: names the parameter, and says what was expected and seen.
    """
    check_numbers(body)
    for name, allowed in HARMLESS.items():
        only(name, getattr(body, name), allowed)
    if body.stream_options is not None:
        only("stream_options.include_usage", body.stream_options.include_usage, (False,))
    top_logprobs = included_logprobs(body)
    store, background = body.store is not False, bool(body.background)
    if background and not store:
        raise InvalidRequest(
            "'background' answers must be stored: expected 'store': true", param="background"
        )
    structure = text_settings(body.text)
    return ResponseCall(
        body=_light(body),
        input=_input(body),
        metadata=metadata(body),
        sampling=msgspec.structs.replace(
            sampling(body, structure.grammar), top_logprobs=top_logprobs
        ),
        structure=structure,
        forced=forced(body),
        priority_class=priority_class(body),
        store=store,
        background=background,
        stream=bool(body.stream),
        resume=resume or store,
        offered=offered(body.tools, body.tool_choice, body.parallel_tool_calls, flat=True),
        effort=_effort(body.reasoning),
    )


def check_frame(frame: CreateFrame, *, resume: bool = False) -> ResponseCall:
    """The call of a `response.create` frame, which is always streamed."""
    if frame.stream is False:
        raise unsupported("stream", False, (True,))
    only("background", frame.background, (False,))
    call = checked(frame, resume=resume)
    return replace(call, events=frame.diptych is not None and bool(frame.diptych.events))


def included_logprobs(body: ResponseBody) -> int | None:
    """How many likely tokens are told beside each chosen one; None: nothing is told.

    `top_logprobs` alone asks for them, as `include` alone does for those of the chosen.

    Raises:
        InvalidRequest: something else is to be included.
    """
    wanted = decode_include(body.include, at="include")
    check_included(wanted)
    told = LOGPROBS in wanted or bool(body.top_logprobs)
    return body.top_logprobs or 0 if told else None


def check_included(wanted: Iterable[str]) -> None:
    """Raise `InvalidRequest` for something that nothing here can include.

    Whoever reads a stored response may ask for what its maker asked for: it is told anyhow.
    """
    for one in wanted:
        if one not in INCLUDED:
            raise unsupported("include", one, INCLUDED)


def _light(body: ResponseBody) -> ResponseBody:
    """`body` without what has been read: that would hold its bytes as long as the answer lasts."""
    return msgspec.structs.replace(body, input="", **dict.fromkeys((*HARMLESS, *_READ), ABSENT))


def _input(body: ResponseBody) -> tuple[StoredMessage, ...]:
    """What this turn adds; nothing, if there is something else to answer to."""
    given = body.input
    if isinstance(given, str):
        return (StoredMessage(role="user", text=given),)
    if not given:
        if body.previous_response_id is None and body.instructions is None:
            raise InvalidRequest(
                "'input' is required where there is neither 'previous_response_id' nor "
                "'instructions', and was not given",
                param="input",
                code="missing_required_parameter",
            )
        return ()
    check_count(len(given), "input items", param="input")
    read = (read_item(f"input[{i}]", item) for i, item in enumerate(given))
    return tuple(message for message in read if message is not None)


def _effort(options: ReasoningOptions | None) -> str | None:
    if options is None:
        return None
    for name in ("summary", "generate_summary"):
        only(f"reasoning.{name}", getattr(options, name), ())
    return options.effort

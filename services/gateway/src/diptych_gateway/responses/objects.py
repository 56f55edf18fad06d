"""The objects of the Responses API, as clients read them."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from diptych_contracts.answer_formats import Tool
from diptych_contracts.journal import End, EndReason, Report
from diptych_contracts.responses import StoredAnswer, StoredResponse
from diptych_gateway.answering.answers import Joules
from diptych_gateway.answering.logprob_objects import joined
from diptych_gateway.responses.items import (
    Item,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    items_of,
    statuses,
    thought_tokens,
)

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]

_STATUS: dict[EndReason, Status] = {
    EndReason.STOP: "completed",
    EndReason.LENGTH: "incomplete",
    EndReason.CANCELLED: "cancelled",
    EndReason.EXPIRED: "failed",
    EndReason.FAILED: "failed",
}
_INCOMPLETE = {EndReason.LENGTH: "max_output_tokens", EndReason.CANCELLED: "cancelled"}
_ERROR_CODES = {EndReason.EXPIRED: "expired", EndReason.FAILED: "server_error"}


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class PathOfResponse(msgspec.Struct):
    """The extension `usage.diptych`: what the journal says, so every gateway says the same."""

    mode: str
    prefill_worker: str
    decode_worker: str
    link: str
    attempt: int
    prefill_wait_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_bytes: int
    decode_ms: float
    joules: Joules
    energy_source: str
    engine: str
    path: str
    parked_ms: float


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int
    diptych: PathOfResponse


class Incomplete(msgspec.Struct):
    reason: str


class Failure(msgspec.Struct):
    code: str
    message: str


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text"] = "text"


class TextSettings(msgspec.Struct, frozen=True):
    format: TextFormat | msgspec.Raw = TextFormat()


class ReasoningSettings(msgspec.Struct, frozen=True):
    effort: str | None
    summary: None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: msgspec.Raw
    strict: bool | None


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningSettings | None
    service_tier: str
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: TextSettings = TextSettings()
    tool_choice: msgspec.Raw
    tools: tuple[FunctionTool, ...]
    top_logprobs: int = 0
    truncation: str = "disabled"
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    usage: ResponseUsage | None = None


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def item_id(stored: StoredResponse) -> str:
    """The id of its one output item."""
    return f"msg_{stored.request_id}"


def in_progress(stored: StoredResponse) -> ResponseObject:
    """A response that has not ended."""
    return _object(stored, status="in_progress")


def ended(stored: StoredResponse, answer: StoredAnswer) -> ResponseObject:
    """A response that has ended with `answer`."""
    reason = answer.end.reason
    status = _STATUS[reason]
    incomplete = _INCOMPLETE.get(reason)
    return _object(
        stored,
        status=status,
        completed_at=answer.ended_unix_s if status == "completed" else None,
        incomplete_details=Incomplete(incomplete) if incomplete else None,
        error=_failure(answer.end),
        output=output(stored, answer),
        usage=_usage(stored, answer),
    )


def shown(stored: StoredResponse) -> ResponseObject:
    """A response as it stands."""
    return in_progress(stored) if stored.answer is None else ended(stored, stored.answer)


def has_item(answer: StoredAnswer) -> bool:
    """Whether there is an output item: some text, or tokens that came to none."""
    return bool(answer.deltas) or (answer.end.reason.is_finish and answer.tokens > 0)


def message(stored: StoredResponse, answer: StoredAnswer) -> OutputMessage:
    """The output item, done."""
    return OutputMessage(
        id=item_id(stored),
        status="completed" if answer.end.reason is EndReason.STOP else "incomplete",
        content=(OutputText(text="".join(answer.deltas), logprobs=joined(answer.logprobs)),),
    )


def items(stored: StoredResponse, answer: StoredAnswer) -> list[Item]:
    """The output items of an answer that has parts, as far as anything was said."""
    made = stored.answer_format
    return [] if made is None else items_of(made, answer, stored.request_id)


def output(stored: StoredResponse, answer: StoredAnswer) -> tuple[OutputItem, ...]:
    """The output items, done."""
    found: Sequence[Item] = items(stored, answer)
    whole = answer.end.reason is EndReason.STOP
    if found:
        return tuple(item.shown(status) for item, status in statuses(found, whole=whole))
    if stored.answer_format is not None:
        empty = answer.end.reason.is_finish and answer.tokens > 0
        status: ItemStatus = "completed" if whole else "incomplete"
        return (Item("message", 0, item_id(stored)).shown(status),) if empty else ()
    return (message(stored, answer),) if has_item(answer) else ()


def _tool(tool: Tool) -> FunctionTool:
    return FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=msgspec.Raw((tool.parameters or "null").encode()),
        strict=tool.strict,
    )


def _failure(end: End) -> Failure | None:
    code = _ERROR_CODES.get(end.reason)
    return Failure(code, end.detail or f"the request {end.reason.value}") if code else None


def _usage(stored: StoredResponse, answer: StoredAnswer) -> ResponseUsage:
    report = answer.end.report or Report(attempt=answer.end.attempt)
    path = PathOfResponse(
        mode=report.mode,
        prefill_worker=report.prefill_worker,
        decode_worker=report.decode_worker,
        link=report.link,
        attempt=report.attempt,
        prefill_wait_ms=report.prefill_wait_ms,
        prefill_ms=report.prefill_ms,
        transfer_ms=report.transfer_ms,
        transfer_bytes=report.transfer_bytes,
        decode_ms=report.decode_ms,
        joules=Joules(report.prefill_j, report.decode_j, report.prefill_j + report.decode_j),
        energy_source=report.energy_source,
        engine=report.engine,
        path=report.path,
        parked_ms=report.parked_ms,
    )
    return ResponseUsage(
        input_tokens=stored.prompt_tokens,
        input_tokens_details=CachedTokens(min(report.cached_tokens, stored.prompt_tokens)),
        output_tokens=answer.tokens,
        output_tokens_details=ReasoningTokens(thought_tokens(stored.answer_format, answer)),
        total_tokens=stored.prompt_tokens + answer.tokens,
        diptych=path,
    )


def _text(stored: StoredResponse) -> TextSettings:
    form = stored.text_format
    return TextSettings(msgspec.Raw(form.encode())) if form else TextSettings()


def _object(stored: StoredResponse, *, status: Status, **ending: Any) -> ResponseObject:
    effort = stored.reasoning_effort
    return ResponseObject(
        id=stored.response_id,
        created_at=stored.created_unix_ms // 1000,
        status=status,
        background=stored.background,
        instructions=stored.instructions,
        max_output_tokens=stored.max_output_tokens,
        model=stored.model,
        parallel_tool_calls=stored.parallel_tool_calls,
        previous_response_id=stored.previous_response_id,
        reasoning=None if effort is None else ReasoningSettings(effort),
        tool_choice=_tool_choice(stored.tool_choice),
        tools=tuple(map(_tool, stored.tools)),
        service_tier=stored.service_tier,
        store=stored.store,
        temperature=stored.sampling.temperature,
        top_p=stored.sampling.top_p,
        text=_text(stored),
        presence_penalty=stored.sampling.presence_penalty,
        frequency_penalty=stored.sampling.frequency_penalty,
        top_logprobs=stored.sampling.top_logprobs or 0,
        metadata=dict(stored.metadata),
        safety_identifier=stored.safety_identifier,
        prompt_cache_key=stored.prompt_cache_key,
        **ending,
    )


def _tool_choice(text: str) -> msgspec.Raw:
    """As the schema has it: `allowed_tools` may come nested, as chat has it."""
    choice = msgspec.json.decode(text)
    if isinstance(choice, dict):
        choice |= choice.pop("allowed_tools", {})
        if isinstance(named := choice.pop("function", None), dict):
            choice |= named
        return msgspec.Raw(msgspec.json.encode(choice))
    return msgspec.Raw(text.encode())

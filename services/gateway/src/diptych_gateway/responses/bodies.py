"""The body of `POST /v1/responses` and the frame `response.create`, as clients write them."""

from typing import Annotated

import msgspec

from diptych_gateway.judging.bodies import ABSENT, CommonBody, ContentPart, decode_as


class InputKind(msgspec.Struct):
    """What an input item is; the rest of it is read once that is known."""

    type: str = "message"


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart]
    type: str = "message"
    # What an output item carries when a client sends it back; they do not change the answer.
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallInput(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an earlier answer made."""

    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class ResultInput(msgspec.Struct, forbid_unknown_fields=True):
    """What a call came to."""

    type: str
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class ReasoningInput(msgspec.Struct, forbid_unknown_fields=True):
    """What an earlier answer thought."""

    type: str
    id: str | None = None
    summary: list[ContentPart] = []
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseBody(CommonBody, kw_only=True, forbid_unknown_fields=True):
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    background: bool | None = None
    text: msgspec.Raw = ABSENT
    # Judged in `tooling`.
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: msgspec.Raw = ABSENT
    reasoning: ReasoningOptions | None = None
    # Accepted only with the value that asks for nothing (`response_checking.HARMLESS`).
    max_tool_calls: msgspec.Raw = ABSENT
    truncation: msgspec.Raw = ABSENT
    top_logprobs: int | None = None
    include: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    context_management: msgspec.Raw = ABSENT


class CreateFrame(ResponseBody, kw_only=True, forbid_unknown_fields=True):
    """A `response.create` frame: the same fields, and what belongs to the connection."""

    type: str
    stream_id: str | None = None
    generate: bool | None = None


class FrameKind(msgspec.Struct):
    """What a frame is, and whose: read first, so that an error finds its lane."""

    type: str
    stream_id: msgspec.Raw = ABSENT


_body_decoder = msgspec.json.Decoder(ResponseBody)
_create_decoder = msgspec.json.Decoder(CreateFrame)
_frame_decoder = msgspec.json.Decoder(FrameKind)
_text_decoder = msgspec.json.Decoder(str)
_include_decoder = msgspec.json.Decoder(Annotated[list[str], msgspec.Meta(max_length=16)] | None)
_kind_decoder = msgspec.json.Decoder(InputKind)
_message_decoder = msgspec.json.Decoder(InputMessage)
_call_decoder = msgspec.json.Decoder(CallInput)
_result_decoder = msgspec.json.Decoder(ResultInput)
_reasoning_decoder = msgspec.json.Decoder(ReasoningInput)


def decode_response(data: bytes) -> ResponseBody:
    """`data` as a body. Raises `InvalidRequest`, see `bodies.decode_as`."""
    return decode_as(_body_decoder, data)


def decode_create(data: str) -> CreateFrame:
    """`data` as a `response.create` frame."""
    return decode_as(_create_decoder, data)


def decode_frame_kind(data: str) -> FrameKind:
    """What frame `data` is."""
    return decode_as(_frame_decoder, data)


def decode_text(data: msgspec.Raw, *, at: str) -> str:
    """`data` as a string."""
    return decode_as(_text_decoder, data, at=at)


def decode_include(data: msgspec.Raw, *, at: str) -> list[str]:
    """`data` as the names of what is to be included."""
    return decode_as(_include_decoder, data, at=at) or []


def decode_kind(item: msgspec.Raw, *, at: str) -> str:
    """The type of an input item."""
    return decode_as(_kind_decoder, item, at=at).type


def decode_message(item: msgspec.Raw, *, at: str) -> InputMessage:
    """An input item of type `message`."""
    return decode_as(_message_decoder, item, at=at)


def decode_call(item: msgspec.Raw, *, at: str) -> CallInput:
    """An input item of type `function_call`."""
    return decode_as(_call_decoder, item, at=at)


def decode_result(item: msgspec.Raw, *, at: str) -> ResultInput:
    """An input item of type `function_call_output`."""
    return decode_as(_result_decoder, item, at=at)


def decode_reasoning(item: msgspec.Raw, *, at: str) -> ReasoningInput:
    """An input item of type `reasoning`."""
    return decode_as(_reasoning_decoder, item, at=at)

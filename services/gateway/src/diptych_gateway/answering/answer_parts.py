"""Chat answers that have parts: calls of tools, and reasoning, beside text.

All that one token brought about is one chunk, so that a client may go on after any of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, Raw
from msgspec.json import encode

from diptych_contracts.answer_formats import AnswerFormat
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import EndReason
from diptych_gateway.answering.answers import (
    AnswerMessage,
    CallDelta,
    Choice,
    Chunk,
    ChunkWriter,
    Delta,
    FunctionDelta,
    Heading,
    WholeCall,
    WholeFunction,
    finish_reason,
)
from diptych_gateway.answering.logprob_objects import ChoiceLogprobs, token_logprobs
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_text.codec import TextCodec
from diptych_text.parsing import AnswerParser
from diptych_text.parts import CallArguments, CallBegun, Part, Reasoning, Text

CALLS = "tool_calls"


def call_id(request_id: RequestId, number: int, *, choice: int = 0) -> str:
    """What call `number` of an answer is called, by every gateway."""
    return f"call_{request_id}_{choice}_{number}" if choice else f"call_{request_id}_{number}"


def delta_of(parts: list[Part], request_id: RequestId, *, choice: int = 0) -> Delta:
    """What `parts` say in one chunk."""
    delta = Delta()
    calls: dict[int, CallDelta] = {}
    for part in parts:
        match part:
            case Text(text):
                delta.content = (delta.content or "") + text
            case Reasoning(text):
                delta.reasoning_content = (delta.reasoning_content or "") + text
            case CallBegun(number, name):
                calls[number] = CallDelta(
                    index=number,
                    id=call_id(request_id, number, choice=choice),
                    type="function",
                    function=FunctionDelta(name=name, arguments=""),
                )
            case CallArguments(number, text):
                if number not in calls:
                    calls[number] = CallDelta(index=number, function=FunctionDelta(arguments=""))
                call = calls[number].function
                call.arguments = (call.arguments or "") + text
    delta.tool_calls = list(calls.values()) or None
    return delta


def chunk_writer(heading: Heading, made: AnswerFormat | None, **told: Any) -> ChunkWriter:
    """The writer of an answer in format `made`; `told` is what every writer is told."""
    return ChunkWriter(heading, **told) if made is None else PartsWriter(heading, made, **told)


class PartsWriter(ChunkWriter):
    """A `ChunkWriter` of an answer with parts."""

    def __init__(self, heading: Heading, made: AnswerFormat, **told: Any) -> None:
        super().__init__(heading, **told)
        self._parser = AnswerParser(made)

    def texts(self, pieces: Iterable[Shown]) -> list[bytes]:
        """A chunk per token that brings something about."""
        chunks: list[bytes] = []
        for shown in pieces:
            parts = self._parser.push(shown.text)
            if shown.at <= self._after or not (parts or shown.logprobs):
                continue
            if len(parts) == 1 and isinstance(parts[0], Text):
                chunks += super().texts((Shown(shown.at, parts[0].text, shown.logprobs),))
            else:
                chunks += self._unseen(shown.at, self._with_logprobs(parts, shown))
        return chunks

    def _with_logprobs(self, parts: list[Part], shown: Shown) -> Chunk:
        logprobs = None
        if self._codec is not None:
            logprobs = Raw(encode(self.logprobs(self._codec, shown.logprobs)))
        return self._chunk(self._delta_of(parts), logprobs=logprobs)

    def finish(self, stream: AnswerStream, reason: str | None = None) -> list[bytes]:
        """The last chunk: with what was held back until the end."""
        delta = self._delta_of(self._parser.finish())
        why = reason or reason_of(stream, self._parser.calls)
        return self._unseen(stream.tokens + 1, self._chunk(delta, finish_reason=why))

    def _delta_of(self, parts: list[Part]) -> Delta:
        return delta_of(parts, self._heading.request_id, choice=self.choice)


def reason_of(stream: AnswerStream, calls: int) -> str:
    """Why an answer with so many calls is complete."""
    reason = finish_reason(stream)
    return CALLS if calls and reason == EndReason.STOP.value else reason


def whole_choice(
    stream: AnswerStream,
    pieces: Sequence[Shown],
    made: AnswerFormat | None,
    *,
    codec: TextCodec | None,
    index: int = 0,
) -> Choice:
    """One whole answer of a call; with `codec`, its logprobs are told."""
    told = [chance for shown in pieces for chance in shown.logprobs]
    text = "".join(shown.text for shown in pieces)
    message = whole_message(text, made, stream.request.request_id)
    calls = 0 if message.tool_calls is UNSET else 1
    return Choice(
        index=index,
        message=message,
        logprobs=None if codec is None else ChoiceLogprobs(token_logprobs(codec, told)),
        finish_reason=reason_of(stream, calls),
    )


def whole_message(text: str, made: AnswerFormat | None, request_id: RequestId) -> AnswerMessage:
    """A whole answer, as one message."""
    if made is None:
        return AnswerMessage(content=text)
    parser = AnswerParser(made)
    delta = delta_of([*parser.push(text), *parser.finish()], request_id)
    calls = [
        WholeCall(
            id=call.id or "",
            function=WholeFunction(
                name=call.function.name or "", arguments=call.function.arguments or ""
            ),
        )
        for call in delta.tool_calls or ()
    ]
    return AnswerMessage(
        content=delta.content if calls else delta.content or "",
        reasoning_content=delta.reasoning_content or UNSET,
        tool_calls=calls or UNSET,
    )

"""The events of one response: a pure function of (response, token ids, end).

    0 response.created        1 response.in_progress
    2 output_item.added       3 content_part.added      before the first text, or a finish without
    4… output_text.delta      one per token that yields text, never put together by timing
    then output_text.done, content_part.done, output_item.done
    last response.completed | .incomplete (its limit, or cancelled) | .failed

So every gateway numbers alike, live or long afterwards, and a client may go on after any number
at any of them. An item that was added is always done, however the response ended.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_contracts.responses import StoredAnswer, StoredResponse
from diptych_gateway.responses.items import OutputItem, OutputMessage, OutputText, ReasoningText
from diptych_gateway.responses.objects import (
    ResponseObject,
    ended,
    has_item,
    in_progress,
    item_id,
    message,
)

_encode = msgspec.json.Encoder().encode

_TERMINAL = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
_DELTA = "response.output_text.delta"


@dataclass(frozen=True, slots=True)
class Event:
    """One event, ready to be framed."""

    number: int
    type: str
    data: bytes


class NumberedEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    sequence_number: int
    stream_id: str | None = None


class ResponseEvent(NumberedEvent, kw_only=True, omit_defaults=True):
    response: ResponseObject


class ItemEvent(NumberedEvent, kw_only=True, omit_defaults=True):
    output_index: int
    item: OutputItem


class PartEvent(NumberedEvent, kw_only=True, omit_defaults=True):
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextDone(NumberedEvent, kw_only=True, omit_defaults=True):
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: msgspec.Raw


class ResponseEvents:
    """Makes the events of one response, in order: `start`, then each `delta`, then `finish`.

    Args:
        stored: What the response says of itself.
        stream_id: A WebSocket's lane, said again in every event.
        after: Events up to this number are counted, but not made.
    """

    def __init__(
        self, stored: StoredResponse, *, stream_id: str | None = None, after: int = -1
    ) -> None:
        self._stored = stored
        self._lane: dict[str, Any] = {} if stream_id is None else {"stream_id": stream_id}
        self._after = after
        self._next = 0
        self._deltas: list[str] = []
        self._logprobs: list[bytes] = []
        self._item = item_id(stored)
        at = {"type": _DELTA, "item_id": self._item, "output_index": 0, "content_index": 0}
        self._delta_head = _encode({**at, **self._lane})[:-1]

    @property
    def deltas(self) -> tuple[str, ...]:
        """The text so far."""
        return tuple(self._deltas)

    @property
    def logprobs(self) -> tuple[bytes, ...]:
        """Those of each of `deltas`, if they were asked for."""
        return tuple(self._logprobs)

    @property
    def last_number(self) -> int:
        """The number of the newest event."""
        return self._next - 1

    def start(self) -> list[Event]:
        """What is known before any token."""
        response = in_progress(self._stored)
        return [
            *self._make(ResponseEvent, "response.created", response=response),
            *self._make(ResponseEvent, "response.in_progress", response=response),
        ]

    def delta(self, text: str, logprobs: bytes = b"") -> list[Event]:
        """Text that one token made showable, and the logprobs of its tokens as JSON, if asked."""
        opening = [] if self._deltas else self._open()
        self._deltas.append(text)
        if logprobs:
            self._logprobs.append(logprobs)
        number = self._count()
        if number <= self._after:
            return opening
        told = (self._delta_head, logprobs or b"[]", number, _encode(text))
        data = b'%b,"logprobs":%b,"sequence_number":%d,"delta":%b}' % told
        return [*opening, Event(number, _DELTA, data)]

    def finish(self, answer: StoredAnswer) -> list[Event]:
        """The end; `answer` holds the text that the deltas were."""
        events = self._outcome(answer)
        response = ended(self._stored, answer)
        return events + self._make(ResponseEvent, _TERMINAL[response.status], response=response)

    def _outcome(self, answer: StoredAnswer) -> list[Event]:
        """What closes the items of the answer."""
        if not has_item(answer):
            return []
        opening = [] if self._deltas else self._open()
        return [*opening, *self._done(answer)]

    def _open(self) -> list[Event]:
        item = OutputMessage(id=self._item, status="in_progress", content=())
        part = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return [
            *self._make(ItemEvent, "response.output_item.added", output_index=0, item=item),
            *self._make(PartEvent, "response.content_part.added", part=OutputText(text=""), **part),
        ]

    def _done(self, answer: StoredAnswer) -> list[Event]:
        item = message(self._stored, answer)
        (part,) = item.content
        at = {"item_id": self._item, "output_index": 0, "content_index": 0}
        done = self._make(
            TextDone, "response.output_text.done", text=part.text, logprobs=part.logprobs, **at
        )
        return [
            *done,
            *self._make(PartEvent, "response.content_part.done", part=part, **at),
            *self._make(ItemEvent, "response.output_item.done", output_index=0, item=item),
        ]

    def _count(self) -> int:
        self._next += 1
        return self._next - 1

    def _make(self, kind: type[NumberedEvent], name: str, **values: Any) -> list[Event]:
        number = self._count()
        if number <= self._after:
            return []
        made = kind(type=name, sequence_number=number, **self._lane, **values)
        return [Event(number, name, _encode(made))]

"""The events of a response whose answer has parts: several items, each opened and closed.

    output_item.added, content_part.added       reasoning and messages
    reasoning.delta | output_text.delta | function_call_arguments.delta
    the delta's .done, content_part.done, output_item.done

One token may bring about several events; all of them are counted, whoever makes them.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from diptych_contracts.answer_formats import AnswerFormat
from diptych_contracts.journal import EndReason
from diptych_contracts.responses import StoredAnswer, StoredResponse
from diptych_gateway.answering.logprob_objects import joined
from diptych_gateway.responses.events import (
    Event,
    ItemEvent,
    NumberedEvent,
    PartEvent,
    ResponseEvents,
    TextDone,
)
from diptych_gateway.responses.items import NO_LOGPROBS, Item, ItemList, ItemStatus, told
from diptych_text.parsing import AnswerParser
from diptych_text.parts import CallBegun, Part, Text


class _TextDelta(NumberedEvent, kw_only=True, omit_defaults=True):
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: msgspec.Raw


class _ReasoningDelta(NumberedEvent, kw_only=True, omit_defaults=True):
    item_id: str
    output_index: int
    content_index: int
    delta: str


class _ReasoningDone(NumberedEvent, kw_only=True, omit_defaults=True):
    item_id: str
    output_index: int
    content_index: int
    text: str


class _ArgumentsDelta(NumberedEvent, kw_only=True, omit_defaults=True):
    item_id: str
    output_index: int
    delta: str


class _ArgumentsDone(NumberedEvent, kw_only=True, omit_defaults=True):
    item_id: str
    output_index: int
    arguments: str


class PartEvents(ResponseEvents):
    """`ResponseEvents` of an answer in format `made`."""

    def __init__(self, stored: StoredResponse, made: AnswerFormat, **told: Any) -> None:
        super().__init__(stored, **told)
        self._parser = AnswerParser(made)
        self._items = ItemList(stored.request_id)

    def delta(self, text: str, logprobs: bytes = b"") -> list[Event]:
        """What one token's text brings about."""
        self._deltas.append(text)
        if logprobs:
            self._logprobs.append(logprobs)
        self._items.tell(logprobs)
        return self._add(self._parser.push(text))

    def _outcome(self, answer: StoredAnswer) -> list[Event]:
        whole = answer.end.reason is EndReason.STOP
        events = self._add(self._parser.finish())
        if not self._items.items and answer.end.reason.is_finish and answer.tokens:
            events += self._opened(self._items.begin(Text("")))
        return events + self._close("completed" if whole else "incomplete")

    def _add(self, parts: list[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if not self._items.goes_on(part):
                events += self._close("completed")
                events += self._opened(self._items.begin(part))
            logprobs = self._items.add(part)
            if not isinstance(part, CallBegun):
                events += self._said(self._items.items[-1], part.text, logprobs)
        return events

    def _opened(self, item: Item) -> list[Event]:
        added = self._make(
            ItemEvent,
            "response.output_item.added",
            output_index=item.index,
            item=item.shown("in_progress"),
        )
        if item.kind == "function_call":
            return added
        name = "response.content_part.added"
        return [*added, *self._make(PartEvent, name, part=item.part, **_place(item))]

    def _said(self, item: Item, text: str, logprobs: bytes) -> list[Event]:
        match item.kind:
            case "message":
                name, at = "response.output_text.delta", _place(item)
                said = msgspec.Raw(logprobs) if logprobs else NO_LOGPROBS
                return self._make(_TextDelta, name, delta=text, logprobs=said, **at)
            case "reasoning":
                name = "response.reasoning.delta"
                return self._make(_ReasoningDelta, name, delta=text, **_place(item))
            case "function_call":
                name = "response.function_call_arguments.delta"
                return self._make(
                    _ArgumentsDelta, name, item_id=item.id, output_index=item.index, delta=text
                )

    def _close(self, status: ItemStatus) -> list[Event]:
        item = self._items.current
        if item is None:
            return []
        events = self._text_done(item)
        if item.kind != "function_call":
            name = "response.content_part.done"
            events += self._make(PartEvent, name, part=item.part, **_place(item))
        name = "response.output_item.done"
        done = item.shown(status)
        return events + self._make(ItemEvent, name, output_index=item.index, item=done)

    def _text_done(self, item: Item) -> list[Event]:
        match item.kind:
            case "message":
                name, at = "response.output_text.done", _place(item)
                return self._make(
                    TextDone, name, text=item.text, logprobs=joined(item.logprobs), **at
                )
            case "reasoning":
                name = "response.reasoning.done"
                return self._make(_ReasoningDone, name, text=item.text, **_place(item))
            case "function_call":
                return self._make(
                    _ArgumentsDone,
                    "response.function_call_arguments.done",
                    item_id=item.id,
                    output_index=item.index,
                    arguments=item.text,
                )


def _place(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


def events_of(stored: StoredResponse, **more: Any) -> ResponseEvents:
    """What makes the events of `stored`; `more` is what every maker is told."""
    made = stored.answer_format
    return ResponseEvents(stored, **more) if made is None else PartEvents(stored, made, **more)


def replayed(
    stored: StoredResponse, answer: StoredAnswer, *, after: int = -1
) -> Iterator[list[Event]]:
    """All events of a response that has ended, as they were made when it ran."""
    events = events_of(stored, after=after)
    yield events.start()
    for text, logprobs in told(answer):
        yield events.delta(text, logprobs)
    yield events.finish(answer)

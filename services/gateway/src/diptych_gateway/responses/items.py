"""The output items of a response, from the parts of its answer: reasoning, messages, calls.

A pure function of the deltas: live, archived or read from the journal, the items are the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

import msgspec

from diptych_contracts.answer_formats import AnswerFormat, ToolCall
from diptych_contracts.ids import RequestId
from diptych_contracts.responses import StoredAnswer, StoredMessage
from diptych_gateway.answering.answer_parts import call_id
from diptych_gateway.answering.logprob_objects import joined
from diptych_text.parsing import AnswerParser
from diptych_text.parts import CallArguments, CallBegun, Part, Reasoning

ItemStatus = Literal["in_progress", "completed", "incomplete"]


NO_LOGPROBS = msgspec.Raw(b"[]")


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: msgspec.Raw = NO_LOGPROBS


class ReasoningText(msgspec.Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(msgspec.Struct, kw_only=True):
    type: Literal["message"] = "message"
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...]


class ReasoningItem(msgspec.Struct, kw_only=True):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...]


class CallItem(msgspec.Struct, kw_only=True):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | CallItem
Kind = Literal["message", "reasoning", "function_call"]


@dataclass(slots=True)
class Item:
    """One output item as it grows."""

    kind: Kind
    index: int
    id: str
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What was said in it: text, or arguments."""
        return "".join(self.pieces)

    @property
    def part(self) -> OutputText | ReasoningText:
        """Its content, if it is not a call."""
        if self.kind == "reasoning":
            return ReasoningText(text=self.text)
        return OutputText(text=self.text, logprobs=joined(self.logprobs))

    def shown(self, status: ItemStatus) -> OutputItem:
        """The item as clients see it."""
        begun = status != "in_progress"
        match self.kind:
            case "message":
                text = (
                    (OutputText(text=self.text, logprobs=joined(self.logprobs)),) if begun else ()
                )
                return OutputMessage(id=self.id, status=status, content=text)
            case "reasoning":
                thought = (ReasoningText(text=self.text),) if begun else ()
                return ReasoningItem(id=self.id, content=thought)
            case "function_call":
                arguments = self.text if begun else ""
                return CallItem(
                    id=self.id,
                    call_id=self.call_id,
                    name=self.name,
                    arguments=arguments,
                    status=status,
                )


class ItemList:
    """Puts parts into items: each part goes on with the last item, or begins a new one."""

    def __init__(self, request_id: RequestId) -> None:
        self._request_id = request_id
        self._told: list[bytes] = []
        self.items: list[Item] = []

    def tell(self, logprobs: bytes) -> None:
        """Logprobs of tokens: they belong to the next part, and are kept if that is text."""
        if logprobs:
            self._told.append(logprobs)

    @property
    def current(self) -> Item | None:
        """The item that grows."""
        return self.items[-1] if self.items else None

    def goes_on(self, part: Part) -> bool:
        """Whether `part` belongs to the current item."""
        current = self.current
        return (
            current is not None and not isinstance(part, CallBegun) and current.kind == _kind(part)
        )

    def begin(self, part: Part) -> Item:
        """A new item for `part`."""
        kind = _kind(part)
        number = sum(item.kind == kind for item in self.items)
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        name = f"{prefix}_{self._request_id}" + (f"_{number}" if number else "")
        item = Item(kind, len(self.items), name)
        if isinstance(part, CallBegun):
            item.name, item.call_id = part.name, call_id(self._request_id, part.call)
        self.items.append(item)
        return item

    def add(self, part: Part) -> bytes:
        """Take in `part` of the current item; gives the logprobs that go with it."""
        item, told, self._told = self.items[-1], self._told, []
        if isinstance(part, CallBegun):
            return b""
        item.pieces.append(part.text)
        if item.kind != "message" or not told:
            return b""
        item.logprobs += told
        return bytes(joined(told))


def _kind(part: Part) -> Kind:
    if isinstance(part, CallBegun | CallArguments):
        return "function_call"
    return "reasoning" if isinstance(part, Reasoning) else "message"


def items_of(made: AnswerFormat, answer: StoredAnswer, request_id: RequestId) -> list[Item]:
    """All items of a whole answer."""
    parser, found = AnswerParser(made), ItemList(request_id)
    for delta, logprobs in told(answer):
        found.tell(logprobs)
        _take(found, parser.push(delta))
    _take(found, parser.finish())
    return found.items


def thought_tokens(made: AnswerFormat | None, answer: StoredAnswer) -> int:
    """How many tokens of an answer that yielded text were reasoning."""
    if made is None or not made.reasoning:
        return 0
    parser = AnswerParser(made)
    for delta in answer.deltas:
        parser.push(delta)
    return parser.thoughts


def told(answer: StoredAnswer) -> Iterator[tuple[str, bytes]]:
    """The deltas of an answer, each with its logprobs, if there are any."""
    return zip(answer.deltas, answer.logprobs or repeat(b""), strict=False)


def _take(found: ItemList, parts: Iterable[Part]) -> None:
    for part in parts:
        if not found.goes_on(part):
            found.begin(part)
        found.add(part)


def statuses(items: Sequence[Item], *, whole: bool) -> Iterator[tuple[Item, ItemStatus]]:
    """The items, done: only the last can be cut off."""
    for item in items:
        cut = not whole and item is items[-1]
        yield item, "incomplete" if cut else "completed"


def spoken(items: Iterable[Item]) -> StoredMessage | None:
    """Items as the message the next turn reads; None: there is nothing in them."""
    text, reasoning, calls = "", "", []
    for item in items:
        match item.kind:
            case "message":
                text += item.text
            case "reasoning":
                reasoning += item.text
            case "function_call":
                calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.text))
    if not (text or reasoning or calls):
        return None
    return StoredMessage(role="assistant", text=text, calls=tuple(calls), reasoning=reasoning)

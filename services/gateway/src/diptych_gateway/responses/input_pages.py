"""`GET /v1/responses/{id}/input_items`: what a stored response was asked, page by page.

These are the items of its own turn; those before it are the input of `previous_response_id`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from starlette.types import Scope

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.responses import StoredMessage, StoredResponse
from diptych_gateway.listening.reading import with_list
from diptych_gateway.responses.checking import check_included

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_LIMIT_DIGITS = 3


class InputText(msgspec.Struct, kw_only=True):
    type: Literal["input_text"] = "input_text"
    text: str


class SaidText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class InputMessage(msgspec.Struct, kw_only=True):
    type: Literal["message"] = "message"
    id: str
    status: Literal["completed"] = "completed"
    role: str
    content: tuple[InputText, ...] | tuple[SaidText, ...]


class InputCall(msgspec.Struct, kw_only=True):
    type: Literal["function_call"] = "function_call"
    id: str
    status: Literal["completed"] = "completed"
    call_id: str
    name: str
    arguments: str


class InputResult(msgspec.Struct, kw_only=True):
    type: Literal["function_call_output"] = "function_call_output"
    id: str
    status: Literal["completed"] = "completed"
    call_id: str
    output: str


class Thought(msgspec.Struct, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class InputReasoning(msgspec.Struct, kw_only=True):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: tuple[()] = ()
    content: tuple[Thought, ...]


InputItem = InputMessage | InputCall | InputResult | InputReasoning


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Which of them are wanted."""

    limit: int = _DEFAULT_LIMIT
    newest_first: bool = True
    after: str | None = None


def page(scope: Scope) -> Page:
    """The page that a query asks for.

    Raises:
        InvalidRequest: names the parameter.
    """
    given, include = with_list(scope, "include")
    check_included(include)
    limit = given.pop("limit", str(_DEFAULT_LIMIT))
    order = given.pop("order", "desc")
    after = given.pop("after", None)
    if given:
        name = next(iter(given))[:80]
        raise InvalidRequest(f"unknown parameter '{name}'", param=name, code="unknown_parameter")
    number = limit.isascii() and limit.isdecimal() and len(limit) <= _LIMIT_DIGITS
    if not (number and 1 <= int(limit) <= _MAX_LIMIT):
        text = f"'limit': expected 1 to {_MAX_LIMIT}, saw {limit[:40]!r}"
        raise InvalidRequest(text, param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order': expected asc or desc, saw {order[:40]!r}", param="order")
    return Page(int(limit), order == "desc", after)


def listed(stored: StoredResponse, wanted: Page) -> ItemList:
    """That page of the input of `stored`, whose messages are at hand.

    Raises:
        InvalidRequest: no item has the id to go on after.
    """
    ids = [f"msg_{stored.request_id}_{number}" for number in range(len(stored.input))]
    order: Sequence[int] = range(len(ids))
    if wanted.newest_first:
        order = order[::-1]
    if wanted.after is not None:
        if wanted.after not in ids:
            text = f"'after': expected the id of an item, saw {wanted.after[:80]!r}"
            raise InvalidRequest(text, param="after")
        order = order[order.index(ids.index(wanted.after)) + 1 :]
    chosen = order[: wanted.limit]
    return ItemList(
        data=[_item(ids[number], stored.input[number]) for number in chosen],
        first_id=ids[chosen[0]] if chosen else None,
        last_id=ids[chosen[-1]] if chosen else None,
        has_more=len(order) > len(chosen),
    )


def _item(item_id: str, message: StoredMessage) -> InputItem:
    """An item as it was sent: each of them is a message of its own (`input_items.read_item`)."""
    if message.calls:
        (call,) = message.calls
        return InputCall(id=item_id, call_id=call.id, name=call.name, arguments=call.arguments)
    if message.call_id is not None:
        return InputResult(id=item_id, call_id=message.call_id, output=message.text)
    if message.reasoning:
        return InputReasoning(id=item_id, content=(Thought(text=message.reasoning),))
    said = message.role == "assistant"
    content = (SaidText(text=message.text),) if said else (InputText(text=message.text),)
    return InputMessage(id=item_id, role=message.role, content=content)

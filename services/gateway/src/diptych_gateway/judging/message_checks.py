"""The messages of a conversation: their roles, their text, and what they say of tools."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.judging.bodies import ABSENT, ChatMessage, ContentPart, decode_as
from diptych_gateway.judging.harmless import only, shown
from diptych_gateway.judging.tooling import check_name

MAX_MESSAGES = 2048
"""Also of the parts of one message; a conversation's history counts."""
MAX_CALL_ID_CHARS = 128
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TOOL = "tool"
_EMPTY_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
}


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _Called
    type: str = "function"
    index: int | None = None


_calls_decoder = msgspec.json.Decoder(list[_Call] | None)


def conversation(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a chat template reads them. Raises `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("expected at least one message, saw none", param="messages")
    check_count(len(messages), "messages", param="messages")
    made = [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    check_results(made, "messages")
    return made


def check_count(count: int, what: str, *, param: str) -> None:
    """Raise `InvalidRequest` for more messages, or parts of one, than anybody needs."""
    if count > MAX_MESSAGES:
        raise InvalidRequest(f"expected at most {MAX_MESSAGES} {what}, saw {count}", param=param)


def check_results(messages: Iterable[Mapping[str, Any]], param: str) -> None:
    """Raise `InvalidRequest` for a tool's result that answers no call before it."""
    called: set[str] = set()
    for number, message in enumerate(messages):
        called.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == TOOL and message["tool_call_id"] not in called:
            raise InvalidRequest(
                f"'{param}[{number}]': expected a result of a call made before it, "
                f"saw one of {shown(message['tool_call_id'])}",
                param=f"{param}[{number}]",
            )


def text_chars(messages: Iterable[Mapping[str, Any]]) -> int:
    """How much text there is in messages, calls included."""
    chars = 0
    for message in messages:
        chars += len(message["content"] or "") + len(message.get("reasoning_content", ""))
        for call in message.get("tool_calls", ()):
            function = call["function"]
            chars += len(function["name"]) + len(function["arguments"])
    return chars


def _message(at: str, message: ChatMessage) -> dict[str, Any]:
    role = TOOL if message.role == TOOL else ROLES.get(message.role)
    if role is None:
        expected = ", ".join((*ROLES, TOOL))
        hint = ": 'tool' has taken its place" if message.role == "function" else ""
        raise InvalidRequest(
            f"'{at}.role': expected one of {expected}, saw {shown(message.role)}{hint}",
            param=f"{at}.role",
        )
    for name, allowed in _EMPTY_IN_MESSAGES.items():
        only(f"{at}.{name}", getattr(message, name), allowed)
    calls = _calls(f"{at}.tool_calls", message.tool_calls)
    if calls and role != "assistant":
        raise _misplaced(f"{at}.tool_calls", "assistant")
    plain: dict[str, Any] = {"role": role, "content": None}
    if message.content is not None or not calls:
        plain["content"] = _content(f"{at}.content", message.content)
    if calls:
        plain["tool_calls"] = calls
    plain |= _reasoning(at, message, role)
    plain |= _call_id(at, message, role)
    return plain if message.name is None else {**plain, "name": message.name}


def _misplaced(at: str, role: str) -> InvalidRequest:
    return InvalidRequest(f"'{at}': expected only in messages of role '{role}'", param=at)


def _calls(at: str, given: msgspec.Raw) -> list[dict[str, Any]]:
    if given == ABSENT:
        return []
    calls = decode_as(_calls_decoder, given, at=at) or []
    check_count(len(calls), f"calls in '{at}'", param=at)
    for number, call in enumerate(calls):
        place = f"{at}[{number}]"
        if call.type != "function":
            raise InvalidRequest(
                f"'{place}.type': expected 'function', saw {shown(call.type)}",
                param=f"{place}.type",
            )
        check_call_id(f"{place}.id", call.id)
        check_name(f"{place}.function.name", call.function.name)
    return [as_call(call.id, call.function.name, call.function.arguments) for call in calls]


def as_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as messages hold it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def check_call_id(at: str, call_id: str) -> None:
    """Raise `InvalidRequest` for an empty or endless id."""
    if not 0 < len(call_id) <= MAX_CALL_ID_CHARS:
        raise InvalidRequest(
            f"'{at}': expected 1 to {MAX_CALL_ID_CHARS} characters, saw {len(call_id)}", param=at
        )


def _reasoning(at: str, message: ChatMessage, role: str) -> dict[str, str]:
    text = message.reasoning_content
    if not text:
        return {}
    if role != "assistant":
        raise _misplaced(f"{at}.reasoning_content", "assistant")
    return {"reasoning_content": text}


def _call_id(at: str, message: ChatMessage, role: str) -> dict[str, str]:
    if role != TOOL:
        if message.tool_call_id is not None:
            raise _misplaced(f"{at}.tool_call_id", TOOL)
        return {}
    if message.tool_call_id is None:
        raise InvalidRequest(
            f"'{at}.tool_call_id' is required and was not given",
            param=f"{at}.tool_call_id",
            code="missing_required_parameter",
        )
    check_call_id(f"{at}.tool_call_id", message.tool_call_id)
    return {"tool_call_id": message.tool_call_id}


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

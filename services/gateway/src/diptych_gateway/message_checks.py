"""The messages of a conversation: their roles, and their text."""

from collections.abc import Mapping
from typing import Any

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.bodies import ChatMessage, ContentPart
from diptych_gateway.harmless import only, shown

MAX_MESSAGES = 2048
"""Also of the parts of one message; a conversation's history counts."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_EMPTY_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning_content": ("",),
}


def conversation(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """The messages as a chat template reads them. Raises `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("expected at least one message, saw none", param="messages")
    check_count(len(messages), "messages", param="messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def check_count(count: int, what: str, *, param: str) -> None:
    """Raise `InvalidRequest` for more messages, or parts of one, than anybody needs."""
    if count > MAX_MESSAGES:
        raise InvalidRequest(f"expected at most {MAX_MESSAGES} {what}, saw {count}", param=param)


def _message(at: str, message: ChatMessage) -> dict[str, str]:
    role = ROLES.get(message.role)
    if role is None:
        expected = ", ".join(ROLES)
        raise InvalidRequest(
            f"'{at}.role': expected one of {expected}, saw {shown(message.role)}",
            param=f"{at}.role",
        )
    for name, allowed in _EMPTY_IN_MESSAGES.items():
        only(f"{at}.{name}", getattr(message, name), allowed)
    plain = {"role": role, "content": _content(f"{at}.content", message.content)}
    return plain if message.name is None else {**plain, "name": message.name}


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

"""Input items of the Responses API as messages: what was said, called, answered and thought."""

from collections.abc import Iterable
from typing import Any

import msgspec

from diptych_contracts.answer_formats import ToolCall
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.responses import StoredMessage
from diptych_gateway.judging.harmless import shown
from diptych_gateway.judging.message_checks import ROLES, TOOL, as_call, check_call_id, joined
from diptych_gateway.judging.tooling import check_name
from diptych_gateway.responses.bodies import (
    decode_call,
    decode_kind,
    decode_message,
    decode_reasoning,
    decode_result,
)

_PARTS = ("input_text", "output_text", "text")
_THOUGHTS = ("reasoning_text", "summary_text", "text")


def read_item(at: str, item: msgspec.Raw) -> StoredMessage | None:
    """One input item; None for one that says nothing.

    Raises:
        InvalidRequest: names the part of it that does not fit.
    """
    match kind := decode_kind(item, at=at):
        case "message":
            return _message(at, item)
        case "function_call":
            return _call(at, item)
        case "function_call_output":
            return _result(at, item)
        case "reasoning":
            return _reasoning(at, item)
        case _:
            raise InvalidRequest(
                f"'{at}': expected an item of type 'message', 'function_call', "
                f"'function_call_output' or 'reasoning', saw {shown(kind)}",
                param=at,
                code="unsupported_content",
            )


def _message(at: str, item: msgspec.Raw) -> StoredMessage:
    message = decode_message(item, at=at)
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"'{at}.role': expected one of {', '.join(ROLES)}, saw {shown(message.role)}",
            param=f"{at}.role",
        )
    content = message.content
    text = content if isinstance(content, str) else joined(f"{at}.content", content, _PARTS)
    return StoredMessage(role=role, text=text)


def _call(at: str, item: msgspec.Raw) -> StoredMessage:
    call = decode_call(item, at=at)
    check_call_id(f"{at}.call_id", call.call_id)
    check_name(f"{at}.name", call.name)
    if call.namespace is not None:
        raise InvalidRequest(f"'{at}.namespace': expected none", param=f"{at}.namespace")
    made = ToolCall(id=call.call_id, name=call.name, arguments=call.arguments)
    return StoredMessage(role="assistant", text="", calls=(made,))


def _result(at: str, item: msgspec.Raw) -> StoredMessage:
    result = decode_result(item, at=at)
    check_call_id(f"{at}.call_id", result.call_id)
    output = result.output
    text = output if isinstance(output, str) else joined(f"{at}.output", output, _PARTS)
    return StoredMessage(role=TOOL, text=text, call_id=result.call_id)


def _reasoning(at: str, item: msgspec.Raw) -> StoredMessage | None:
    thought = decode_reasoning(item, at=at)
    if thought.encrypted_content:
        raise InvalidRequest(
            f"'{at}.encrypted_content': expected none: this server encrypts no reasoning",
            param=f"{at}.encrypted_content",
        )
    parts, place = thought.content or thought.summary, "content" if thought.content else "summary"
    text = joined(f"{at}.{place}", parts, _THOUGHTS) if parts else ""
    return StoredMessage(role="assistant", text="", reasoning=text) if text else None


def as_messages(stored: Iterable[StoredMessage]) -> list[dict[str, Any]]:
    """Messages as a chat template reads them.

    Reasoning, text and calls of one answer are items of their own here, and one message there.
    """
    made: list[dict[str, Any]] = []
    last: StoredMessage | None = None
    for message in stored:
        plain = _plain(message)
        if last is not None and _same_answer(last, message):
            made[-1] = _merged(made[-1], plain)
        else:
            made.append(plain)
        last = message
    return [message for message in made if _holds_anything(message)]


def _same_answer(last: StoredMessage, message: StoredMessage) -> bool:
    """Whether two messages in a row are items of one answer: no text after text."""
    if last.role != "assistant" or message.role != "assistant":
        return False
    return bool(message.calls) or (bool(last.reasoning) and not (last.text or last.calls))


def _plain(message: StoredMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.calls:
        made["content"] = message.text or None
        made["tool_calls"] = [as_call(c.id, c.name, c.arguments) for c in message.calls]
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.call_id is not None:
        made["tool_call_id"] = message.call_id
    return made


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    made = {**first, **second}
    made["content"] = (first["content"] or "") + (second["content"] or "") or None
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if calls:
        made["tool_calls"] = calls
    else:
        made["content"] = made["content"] or ""
    return made


def _holds_anything(message: dict[str, Any]) -> bool:
    """An answer's reasoning whose answer was not sent back is nothing a template could say."""
    bare = message["role"] == "assistant" and not message["content"]
    return not bare or "tool_calls" in message or "reasoning_content" not in message

"""Messages about tools, in the form one chat template takes them.

They come in OpenAI's form. Where a template knows no tools, the model is told of them in words of
our own, and calls and results become messages it knows: the documented fallback.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from diptych_contracts.answer_formats import Tool
from diptych_text.template_traits import TemplateTraits

_INSTRUCTIONS = """\
You can call functions. These are the functions you may call, one JSON object per line:
{tools}
To call a function, answer with a JSON object of its name and its arguments between two tags:
<tool_call>
{{"name": "<function name>", "arguments": {{<arguments>}}}}
</tool_call>
Results come back between <tool_response> and </tool_response>. If no function is needed, answer \
in plain words."""

MAX_LEVELS = 64
"""Deepest nesting of a schema, or of arguments that become a mapping."""

Messages = Sequence[Mapping[str, Any]]


def prepared(
    messages: Messages, tools: Sequence[Tool], traits: TemplateTraits
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools for a template of these traits."""
    listed = [_listed(tool) for tool in tools]
    own = [_own(message, traits) for message in messages] if traits.calls else _plain(messages)
    if listed and not traits.tools:
        return _told(own, listed), None
    return own, listed or None


def about_tools(messages: Messages) -> bool:
    """Whether a message calls a tool, or answers a call."""
    return any("tool_calls" in m or m["role"] == "tool" for m in messages)


def _listed(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    empty = {"type": "object", "properties": {}}
    parameters = empty if tool.parameters is None else msgspec.json.decode(tool.parameters)
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _own(message: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    made = dict(message)
    if "tool_calls" in made:
        made["tool_calls"] = [_call(call, traits) for call in made["tool_calls"]]
        if made.get("content") in (None, ""):
            made["content"] = None if traits.null_content else ""
    if "tool_call_id" in made:
        made["tool_call_id"] = _short_id(made["tool_call_id"])
    return made


def _call(call: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    function = call["function"]
    arguments: Any = function["arguments"]
    if not traits.text_arguments:
        arguments = _mapping(arguments)
    made = {"name": function["name"], "arguments": arguments}
    return {"id": _short_id(call["id"]), "type": "function", "function": made}


def _mapping(arguments: str) -> Any:
    """Arguments as the model wrote them, cut off perhaps."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}
    if deeper(found, MAX_LEVELS):
        return {"arguments": arguments}
    return found if isinstance(found, dict) else {"arguments": found}


def deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects nest deeper than `levels`."""
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    return levels < 0 or any(deeper(item, levels - 1) for item in inner)


def _short_id(call_id: str) -> str:
    """Nine letters and digits, the only form that every template takes."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _plain(messages: Messages) -> list[dict[str, Any]]:
    """Calls as the model would write them, results as what the user says."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if made and made[-1].get("results"):
                made[-1]["content"] += f"\n{text}"
            else:
                made.append({"role": "user", "content": text, "results": True})
        elif "tool_calls" in message:
            calls = [_written(call["function"]) for call in message["tool_calls"]]
            text = "\n".join(filter(None, (message.get("content"), *calls)))
            made.append({"role": "assistant", "content": text})
        else:
            made.append(dict(message))
    return [{key: value for key, value in m.items() if key != "results"} for m in made]


def _written(function: Mapping[str, Any]) -> str:
    arguments = _mapping(function["arguments"])
    call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _told(messages: list[dict[str, Any]], listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in listed)
    words = _INSTRUCTIONS.format(tools=lines)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{words}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": words}, *messages]

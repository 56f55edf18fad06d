"""What a chat template can say of tools, found out by having it say something.

Templates differ: some take a call's arguments as JSON text, some as a mapping, many know no tools
at all. A search for words would guess; a probe sees what comes out.
"""

from dataclasses import dataclass
from typing import Any

from diptych_contracts.errors import InvalidRequest
from diptych_text.templates import ChatTemplate

_TOOL, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe_value", "probe_result"
_ID = "call0prob"
"""Nine letters and digits: some templates insist."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template can do."""

    tools: bool = False
    """It lists tools."""
    calls: bool = False
    """It says calls of tools again, and their results."""
    text_arguments: bool = False
    """A call's arguments are JSON text for it, not a mapping."""
    null_content: bool = True
    """A call's message may have no content."""


def traits_of(template: ChatTemplate) -> TemplateTraits:
    """Probe `template`; costs a few renderings."""
    if not _says(template, [_user()], _TOOL, tools=[_tool()]):
        return TemplateTraits()
    for content in (None, ""):
        for text_arguments in (False, True):
            messages = _exchange(content, text_arguments=text_arguments)
            if _says(template, messages, _TOOL, f'"{_KEY}"', f'"{_VALUE}"', _RESULT):
                return TemplateTraits(True, True, text_arguments, content is None)
            if _says(template, messages, _TOOL, f"{_KEY}", _VALUE, _RESULT, lacks=f"'{_KEY}'"):
                return TemplateTraits(True, True, text_arguments, content is None)
    return TemplateTraits(tools=True)


def _says(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    *words: str,
    tools: list[dict[str, Any]] | None = None,
    lacks: str = "\0",
) -> bool:
    try:
        text = template.render(messages, tools=tools)
    except InvalidRequest:
        return False
    escaped = '\\"'  # arguments that became JSON twice
    return all(word in text for word in (*words,)) and lacks not in text and escaped not in text


def _user() -> dict[str, Any]:
    return {"role": "user", "content": "probe"}


def _tool() -> dict[str, Any]:
    properties = {_KEY: {"type": "string", "description": "probe"}}
    parameters = {"type": "object", "properties": properties, "required": [_KEY]}
    function = {"name": _TOOL, "description": "probe", "parameters": parameters}
    return {"type": "function", "function": function}


def _exchange(content: str | None, *, text_arguments: bool) -> list[dict[str, Any]]:
    arguments = f'{{"{_KEY}": "{_VALUE}"}}' if text_arguments else {_KEY: _VALUE}
    call = {"id": _ID, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    return [
        _user(),
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": _ID, "name": _TOOL},
    ]

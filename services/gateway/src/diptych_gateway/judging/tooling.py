"""Which tools a client offers the model, and what it says of their use; judged."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from diptych_contracts.answer_formats import Tool
from diptych_contracts.errors import InvalidRequest
from diptych_gateway.judging.bodies import ABSENT, as_text, decode_as
from diptych_gateway.judging.harmless import shown
from diptych_text.tool_messages import MAX_LEVELS, deeper

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
MAX_DESCRIPTION_CHARS = 16 * 1024
_CHOICE_BYTES = 16 * 1024
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class _ChatTool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    function: msgspec.Raw = ABSENT


class _FlatTool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class _Kind(msgspec.Struct):
    type: str


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    mode: str
    tools: list[dict[str, Any]]


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    function: _Named | None = None
    allowed_tools: _Allowed | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] | None = None


_choice_decoder = msgspec.json.Decoder(str | _Choice)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_kind_decoder = msgspec.json.Decoder(_Kind)
_chat_decoder = msgspec.json.Decoder(_ChatTool)
_flat_decoder = msgspec.json.Decoder(_FlatTool)
_function_decoder = msgspec.json.Decoder(_Function)


@dataclass(frozen=True, slots=True)
class Tooling:
    """The tools of one request, as far as they are to be used."""

    tools: tuple[Tool, ...]
    must: tuple[str, ...] = ()
    """Names, one of which is to be called; none: as the model likes."""
    single: bool = False
    """At most one call: by wish, or where one is demanded and several were not asked for. (A weak
    model that must call and may call again says the same again.)"""

    @property
    def chars(self) -> int:
        """How much text they are."""
        return sum(
            len(tool.name) + len(tool.description or "") + len(tool.parameters or "")
            for tool in self.tools
        )


@dataclass(frozen=True, slots=True)
class Offered:
    """What a body says of tools."""

    tools: tuple[Tool, ...] = ()
    choice: str = '"auto"'
    """JSON."""
    parallel: bool = True
    tooling: Tooling | None = None
    """None: the model is told of none."""


def offered(
    tools: msgspec.Raw, choice: msgspec.Raw, parallel: msgspec.Raw, *, flat: bool = False
) -> Offered:
    """What a body's `tools`, `tool_choice` and `parallel_tool_calls` say together.

    Args:
        tools: As the body has them.
        choice: Likewise.
        parallel: Likewise.
        flat: Whether a function's fields stand in the tool itself, as the Responses API has them.

    Raises:
        InvalidRequest: names the parameter.
    """
    known = _tools(tools, flat=flat)
    several = _parallel(parallel)
    plain = _choice(choice)
    text = '"auto"' if choice == ABSENT else msgspec.json.encode(plain).decode()
    mode, names = _meaning(plain, known)
    if mode == "none" or not known:
        return Offered(known, text, several)
    told = known
    if names and mode == "auto":  # allowed ones: the model is told of no others
        told = tuple(tool for tool in known if tool.name in names)
    must = (names or tuple(tool.name for tool in known)) if mode != "auto" else ()
    single = mode == "named" or not several or (bool(must) and parallel == ABSENT)
    tooling = Tooling(told, must, single)
    return Offered(known, text, several, tooling)


def _parallel(parallel: msgspec.Raw) -> bool:
    if bytes(parallel) not in (b"true", b"false", b"null"):
        raise InvalidRequest(
            "'parallel_tool_calls': expected true or false, "
            f"saw {bytes(parallel)[:40].decode('utf-8', 'replace')}",
            param="parallel_tool_calls",
        )
    return bytes(parallel) != b"false"


def _tools(given: msgspec.Raw, *, flat: bool) -> tuple[Tool, ...]:
    if given == ABSENT:
        return ()
    if len(bytes(given)) > MAX_TOOLS_BYTES:
        raise InvalidRequest(
            f"'tools': expected at most {MAX_TOOLS_BYTES} bytes, saw {len(bytes(given))}",
            param="tools",
        )
    items = decode_as(_list_decoder, given, at="tools")
    if len(items) > MAX_TOOLS:
        raise InvalidRequest(
            f"'tools': expected at most {MAX_TOOLS}, saw {len(items)}", param="tools"
        )
    found: dict[str, Tool] = {}
    for number, item in enumerate(items):
        at = f"tools[{number}]"
        tool = _tool(at, item, flat=flat)
        if tool.name in found:
            raise InvalidRequest(f"'{at}': two tools are called '{tool.name}'", param=at)
        found[tool.name] = tool
    return tuple(found.values())


def _tool(at: str, item: msgspec.Raw, *, flat: bool) -> Tool:
    kind = decode_as(_kind_decoder, item, at=at).type
    if kind != "function":
        raise InvalidRequest(
            f"'{at}.type': expected 'function', saw {shown(kind)}: this server has no tools itself",
            param=f"{at}.type",
            code="unsupported_parameter",
        )
    function: _FlatTool | _Function
    if flat:
        function = decode_as(_flat_decoder, item, at=at)
    else:
        inner = decode_as(_chat_decoder, item, at=at).function
        if inner == ABSENT:
            raise InvalidRequest(
                f"'{at}.function' is required and was not given",
                param=f"{at}.function",
                code="missing_required_parameter",
            )
        at = f"{at}.function"
        function = decode_as(_function_decoder, inner, at=at)
    check_name(f"{at}.name", function.name)
    description = function.description
    if description is not None and len(description) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(
            f"'{at}.description': expected at most {MAX_DESCRIPTION_CHARS} characters, "
            f"saw {len(description)}",
            param=f"{at}.description",
        )
    schema = _schema(f"{at}.parameters", function.parameters)
    return Tool(
        name=function.name, description=description, parameters=schema, strict=function.strict
    )


def check_name(at: str, name: str) -> None:
    """Raise `InvalidRequest` for what cannot be a function's name."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{at}': expected 1 to 64 letters, digits, underscores or hyphens, saw {shown(name)}",
            param=at,
        )


def _schema(at: str, given: msgspec.Raw) -> str | None:
    if given == ABSENT:
        return None
    text = as_text(given, at=at)
    schema = decode_as(_any_decoder, given, at=at)
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"'{at}': expected a JSON schema, an object, saw {shown(schema)}", param=at
        )
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"'{at}.type': expected 'object', saw {shown(schema['type'])}", param=f"{at}.type"
        )
    if deeper(schema, MAX_LEVELS):
        raise InvalidRequest(f"'{at}': expected at most {MAX_LEVELS} levels, saw more", param=at)
    return text


_any_decoder = msgspec.json.Decoder()


def _choice(given: msgspec.Raw) -> str | dict[str, Any]:
    if given == ABSENT:
        return "auto"
    if len(bytes(given)) > _CHOICE_BYTES:
        raise InvalidRequest(
            f"'tool_choice': expected at most {_CHOICE_BYTES} bytes", param="tool_choice"
        )
    choice = decode_as(_choice_decoder, given, at="tool_choice")
    if isinstance(choice, str):
        return choice
    plain: dict[str, Any] = msgspec.json.decode(given)
    return plain


Mode = Literal["none", "auto", "required", "named"]


def _meaning(choice: str | dict[str, Any], tools: tuple[Tool, ...]) -> tuple[Mode, tuple[str, ...]]:
    known = {tool.name for tool in tools}
    match choice:
        case "none" | "auto":
            return choice, ()
        case "required":
            if not tools:
                raise InvalidRequest(
                    "'tool_choice': expected 'tools' beside 'required'", param="tool_choice"
                )
            return "required", ()
        case {"type": "function", "name": str(name)} | {
            "type": "function",
            "function": {"name": str(name)},
        }:
            return "named", (_known(name, known),)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*allowed]}} | {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [*allowed],
        } if mode in ("auto", "required") and allowed:
            names = tuple(_known(_name_of(tool), known) for tool in allowed)
            return ("required" if mode == "required" else "auto"), names
        case _:
            raise InvalidRequest(
                "'tool_choice': expected 'none', 'auto', 'required', one function by name, or "
                f"'allowed_tools' with a mode, saw {shown(choice)}",
                param="tool_choice",
            )


def _name_of(tool: Any) -> str:
    match tool:
        case {"type": "function", "name": str(name)} | {
            "type": "function",
            "function": {"name": str(name)},
        }:
            return name
        case _:
            return repr(tool)


def _known(name: str, known: set[str]) -> str:
    if name not in known:
        raise InvalidRequest(
            f"'tool_choice': expected the name of one of 'tools', saw {shown(name)}",
            param="tool_choice",
        )
    return name

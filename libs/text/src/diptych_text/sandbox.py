"""The Jinja environment chat templates run in: sandboxed, metered, and as Hugging Face's."""

import functools
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from diptych_contracts.errors import InvalidRequest
from diptych_text.metering import charge, check_size, measured

# What builds a large value from a small argument.
_GREEDY_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "format", "indent", "pprint", "random", "slice"}
    | {"urlize", "wordwrap", "xmlattr"}
)
_GREEDY_METHODS = frozenset(
    {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"}
)
# What makes a string of any value: a list can hold one long string a million times.
_WRITING_FILTERS = frozenset(
    {"capitalize", "e", "escape", "float", "forceescape", "int", "join", "lower", "replace", "safe"}
    | {"string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "wordcount"}
)
_MAX_INDENT = 16


class _Metering(NodeTransformer):
    """Charges every loop turn, joined string and captured block of a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(node, "charge", [])))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(node, "joined", node.nodes)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        inner = node.filter if isinstance(node.filter, nodes.Filter) else None
        node.filter = nodes.Filter(inner, "charged", [], [], None, None)
        return node


def _call(at: nodes.Node, attribute: str, arguments: list[nodes.Expr]) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(attribute), arguments, [], None, None)
    return call.set_lineno(at.lineno)  # type: ignore[return-value]


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training: kept."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's own body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates. Message content is data: it is never compiled."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=measured,
        )
        self.charge = charge
        self.filters = {
            name: _charged(function, writes=name in _WRITING_FILTERS)
            for name, function in self.filters.items()
            if name not in _GREEDY_FILTERS
        }
        self.filters["replace"] = _charged(_replace)
        self.filters |= {"charged": charge, "tojson": _tojson, "indent": _charged(_indent)}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metering().visit(source), *args, **kwargs)

    def joined(self, *parts: Any) -> str:
        """`a ~ b`."""
        return str(charge("".join(map(str, measured(parts)))))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """`function(…)`, charged for."""
        text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(text, str):
            if name == "replace":
                return charge(_replace(text, *args, **kwargs))
            measured(args)
        return charge(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """`"…".format`, which builds a large string from a small width: refused."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("str.format is not supported in chat templates")
        return None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, if the result is of a reasonable size."""
        if operator in ("*", "**"):
            check_size(_size_of_product(operator, left, right))
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not supported in chat templates")
        return charge(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use `obj.attr`."""
        if isinstance(obj, str | bytes) and attr in _GREEDY_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


def _charged(function: Callable[..., Any], *, writes: bool = False) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's marks for what it passes first
    def metered(*args: Any, **kwargs: Any) -> Any:
        if writes:
            measured(args)
        return charge(function(*args, **kwargs))

    return metered


def _size_of_product(operator: str, left: Any, right: Any) -> int:
    """Characters or items of `left * right`, or (numbers) its bits; of a power likewise."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return bits * abs(right) if operator == "**" else bits + right.bit_length()
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return 0


def _replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    subject, old, new = str(measured(text)), str(old), str(new)
    check_size(len(subject) + subject.count(old) * len(new))
    return subject.replace(old, new, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, _MAX_INDENT)
    check_size(len(text) + (text.count("\n") + 1) * len(margin))
    lines = text.splitlines(keepends=True)
    return "".join(
        margin + line if (number or first) and (blank or line.strip()) else line
        for number, line in enumerate(lines)
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face renders it: not escaped for HTML."""
    indent = None if indent is None else min(indent, _MAX_INDENT)
    text = json.dumps(
        measured(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return str(charge(text))


def _raise_exception(message: object) -> None:
    raise InvalidRequest(f"the chat template refuses the messages: {message}", param="messages")


def _strftime_now(pattern: str) -> str:
    return datetime.now(tz=UTC).strftime(str(pattern)[:64])

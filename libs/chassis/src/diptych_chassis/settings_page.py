"""Every setting of a service as a page: its variable, what it takes, its default, what it does."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_type_hints

_WIDTH = 96
_INDENT = "    "


def page(cls: Any, service: str, *, own_prefix: str, shared: frozenset[str], kinds: Any) -> str:
    """The page of a service's settings.

    Args:
        cls: Its dataclass, whose fields are told about by the strings below them.
        service: Its name.
        own_prefix: How its variables begin.
        shared: Fields that every service has.
        kinds: Says in words what a type takes.
    """
    hints, said = get_type_hints(cls), dict(_meanings(cls))
    head = (
        f"Settings of the {service}: environment variables, read once at its start. A name that is "
        f"none, or a value that does not fit, stops it. DIPTYCH_ALL__ sets what every service has; "
        f"with {own_prefix} instead it is set for this one alone, and that counts."
    )
    parts = [textwrap.fill(head, _WIDTH), ""]
    for field in sorted(fields(cls), key=lambda field: field.name in shared):
        start = "DIPTYCH_ALL__" if field.name in shared else own_prefix
        parts.append(f"{start}{field.name.upper()}")
        parts.append(f"{_INDENT}{kinds(hints[field.name])}; {_default(field)}")
        if meaning := said.get(field.name):
            parts.append(
                textwrap.fill(meaning, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
            )
    return "\n".join(parts) + "\n"


def _default(field: "Field[Any]") -> str:
    if field.default is MISSING:
        return "must be set" if field.default_factory is MISSING else "default: none"
    return f"default: {_written(field.default)}"


def _written(value: Any) -> str:
    """A value as its variable would say it."""
    match value:
        case None | () | "":
            return "none"
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(map(_written, value))
        case float():
            return f"{value:g}"
        case Path():
            return str(value)
    return str(value)


def _meanings(cls: Any) -> Iterator[tuple[str, str]]:
    """Each field's name and what the string below it says; a subclass's word counts."""
    for part in reversed(cls.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(tree, ast.ClassDef)
        for named, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(named, ast.AnnAssign) and isinstance(named.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield named.target.id, " ".join(text.split())

"""Holds an engine against the contract: names, kinds, defaults and values, without running it."""

import builtins
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Protocol

from diptych_engine.tensorrt_llm.contract import (
    UNSAID,
    Class,
    Contract,
    Item,
    Method,
    at,
    default_of,
)
from diptych_engine.tensorrt_llm.versions import Version, has_begun, in_range

_MISSING: Any = object()
_ABSTRACT = {"Sequence": "list", "Mapping": "dict", "Path": "str", "PathLike": "str"}


class Importer(Protocol):
    """Imports a module by name: `importlib.import_module`, or a fake's."""

    def __call__(self, name: str, /) -> Any:
        """The module. Raises `ImportError`."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """Where engine and contract differ."""

    where: str
    expected: str
    seen: str
    fatal: bool = True
    """Whether the adapter cannot work so; otherwise it does without, or says what it wants."""

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.seen}"


def check(contract: Contract, version: str, importer: Importer = import_module) -> list[Problem]:
    """Where the engine differs from `contract`, all of it at once.

    Args:
        contract: What is expected.
        version: The engine's own, which decides what is expected.
        importer: Where its modules come from.
    """
    try:
        seen = Version.of(version)
    except ValueError as err:
        return [Problem("version", contract.versions, str(err))]
    problems: list[Problem] = []
    if not in_range(seen, contract.versions):
        problems.append(Problem("version", contract.versions, version))
    for name, told in contract.classes.items():
        try:
            module, _, attribute = told.path.partition(":")
            found = getattr(importer(module), attribute)
        except (ImportError, AttributeError) as err:
            problems.append(Problem(name, f"{told.path} to be there", str(err)))
            continue
        problems += _class(name, told, found, seen)
    return problems


def _class(name: str, told: Class, found: Any, version: Version) -> Iterator[Problem]:
    seen = fields_of(found)
    for field, item in at(told.fields, version).items():
        where = f"{name}.{field}"
        if field not in seen:
            yield Problem(where, "a field", "none of that name", fatal=not item.optional)
            continue
        annotation, default = seen[field]
        yield from _item(where, item, annotation, default)
        yield from _accepted(where, found, field, item)
    for method, expected in told.methods.items():
        if has_begun(version, expected.since):
            yield from _method(f"{name}.{method}", expected, found, method, version)
    for attribute in told.attributes:
        if not hasattr(found, attribute) and attribute not in seen:
            yield Problem(f"{name}.{attribute}", "an attribute", "none of that name")
    for member in told.members:
        if member not in getattr(found, "__members__", {}) and not hasattr(found, member):
            yield Problem(f"{name}.{member}", "a member", "none of that name")
    if told.subclass_of and not issubclass(found, getattr(builtins, told.subclass_of)):
        yield Problem(name, f"a subclass of {told.subclass_of}", str(found.__mro__))


def _method(where: str, told: Method, owner: Any, name: str, version: Version) -> Iterator[Problem]:
    method = getattr(owner, name, None)
    if method is None:
        yield Problem(where, "a method", "none of that name", fatal=not told.optional)
        return
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError) as err:
        yield Problem(where, "a signature", str(err), fatal=False)
        return
    order = [parameter for parameter in parameters if parameter != "self"]
    for name, item in at(told.parameters, version).items():
        here = f"{where}({name})"
        if (seen := parameters.get(name)) is None:
            yield Problem(here, "a parameter", "none of that name", fatal=not item.optional)
        elif item.variadic:
            if seen.kind is not inspect.Parameter.VAR_KEYWORD:
                yield Problem(here, "any keyword", str(seen))
        elif item.place is not None and order.index(name) != item.place:
            yield Problem(here, f"place {item.place}", f"place {order.index(name)}")
        else:
            default = _MISSING if seen.default is inspect.Parameter.empty else seen.default
            yield from _item(here, item, seen.annotation, default)


def _item(where: str, item: Item, annotation: Any, default: Any) -> Iterator[Problem]:
    kinds = kinds_of(annotation)
    if kinds and item.kind != "object" and item.kind not in kinds:
        fits = item.kind == "int" and "float" in kinds
        if not fits:
            yield Problem(where, item.kind, " or ".join(sorted(kinds)))
    wanted = default_of(item)
    if wanted != UNSAID and (default is _MISSING or default != wanted):
        told = "none" if default is _MISSING else repr(default)
        yield Problem(where, f"the default {wanted!r}", told, fatal=default is _MISSING)
    values = values_of(annotation)
    if missing := [value for value in item.values if values and value not in values]:
        yield Problem(where, f"the values {missing}", f"only {sorted(map(str, values))}")


def _accepted(where: str, owner: Any, field: str, item: Item) -> Iterator[Problem]:
    for value in item.accepted:
        try:
            owner(**{field: value})
        except (TypeError, ValueError) as err:
            yield Problem(where, f"the value {value!r}", str(err))


def fields_of(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of each field of a dataclass or a pydantic model.

    A default that is missing, or made anew each time, is a private mark that equals nothing.
    """
    if dataclasses.is_dataclass(owner):
        hints = _hints(owner)
        return {
            field.name: (
                hints.get(field.name, field.type),
                _MISSING if field.default is dataclasses.MISSING else field.default,
            )
            for field in dataclasses.fields(owner)
        }
    models = getattr(owner, "model_fields", None)
    if not isinstance(models, dict):
        return {}
    return {
        name: (model.annotation, _MISSING if model.is_required() else model.default)
        for name, model in models.items()
    }


def _hints(owner: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner)
    except Exception:  # annotations of another maker: whatever does not resolve is not judged
        return {}


def kinds_of(annotation: Any) -> set[str]:
    """The kinds of value that an annotation lets through; empty where it does not say."""
    if annotation in (inspect.Parameter.empty, Any, object) or isinstance(annotation, str):
        return set()
    if annotation is None or annotation is type(None):
        return {"none"}
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [kinds_of(part) for part in typing.get_args(annotation)]
        return set().union(*parts) if all(parts) else set()
    if origin is typing.Literal:
        return {type(value).__name__ for value in typing.get_args(annotation)}
    if origin is typing.Annotated:
        return kinds_of(typing.get_args(annotation)[0])
    found = origin or annotation
    if not isinstance(found, type):
        return set()
    if issubclass(found, Enum):
        return {base.__name__ for base in found.__mro__ if base in (int, str)} or {"object"}
    name = found.__name__
    return {_ABSTRACT.get(name, name)}


def values_of(annotation: Any) -> set[Any]:
    """The values of a closed set; empty where an annotation names none."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return set(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return set().union(*(values_of(part) for part in typing.get_args(annotation)))
    return set()

"""Which fields an engine's HTTP interface has: what a strict fake is built from.

A table names a field by its path: `choices[].token_ids` is in every object of the list `choices`.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diptych_contracts.errors import Permanent

log = logging.getLogger("diptych.engine")

OBJECT = "object"
"""A field whose own fields stand in the table."""
OBJECTS = "objects"
"""A list of such objects."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field."""

    kind: Any
    """A type, `OBJECT` or `OBJECTS`."""
    required: bool = False


Fields = Mapping[str, Field]


@dataclass(frozen=True, slots=True)
class Call:
    """One thing the interface can be asked."""

    method: str
    path: str
    request: Fields = field(default_factory=dict)
    response: Fields = field(default_factory=dict)
    """Of the whole answer, or of each event."""
    since: str = ""
    """First version in which it does all that the adapter asks of it; empty: the contract's."""


@dataclass(frozen=True, slots=True)
class Contract:
    """An engine's interface, as far as its adapter uses it."""

    engine: str
    versions: tuple[str, str]
    """First one with all these fields, and the newest one they were read in."""
    calls: Mapping[str, Call]


def faults(fields: Fields, value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What is wrong with `value`: fields that are unknown, missing, or of another kind."""
    for name, inner in value.items():
        path = prefix + name
        known = fields.get(path)
        if known is None:
            yield f"unknown field {path}"
        elif known.kind is OBJECT or known.kind is OBJECTS:
            yield from _within(fields, known.kind, inner, path)
        else:
            try:
                msgspec.convert(inner, known.kind, strict=True)
            except msgspec.ValidationError as err:
                yield f"{path}: {err}"
    for path, known in fields.items():
        name = path.removeprefix(prefix)
        is_here = path.startswith(prefix) and "." not in name
        if known.required and is_here and name not in value:
            yield f"missing field {path}"


def _within(fields: Fields, kind: str, inner: Any, path: str) -> Iterator[str]:
    values = [inner] if kind is OBJECT else inner
    step = "." if kind is OBJECT else "[]."
    if not isinstance(values, list):
        yield f"{path}: expected a list"
        return
    for one in values:
        if isinstance(one, dict):
            yield from faults(fields, one, path + step)
        else:
            yield f"{path}: expected an object"


def shaped(fields: Fields, value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`value` as the contract has it: fields it does not know are left out."""
    result: dict[str, Any] = {}
    for name, inner in value.items():
        known = fields.get(prefix + name)
        if known is None:
            continue
        if known.kind is OBJECT and isinstance(inner, dict):
            result[name] = shaped(fields, inner, f"{prefix}{name}.")
        elif known.kind is OBJECTS and isinstance(inner, list):
            result[name] = [shaped(fields, one, f"{prefix}{name}[].") for one in inner]
        else:
            result[name] = inner
    return result


def see_version(contract: Contract, version: str) -> None:
    """Warn of a `version` newer than the fields were read in, by more than a patch.

    Raises:
        Permanent: it is older than the first one with all of them.
    """
    least, newest = contract.versions
    if version_key(version) < version_key(least):
        raise Permanent(f"{contract.engine} {version} is too old: expected {least} or later")
    if version_key(version)[:2] > version_key(newest)[:2]:
        log.warning("engine_newer_than_contract", extra={"version": version, "known": newest})


def version_key(version: str) -> tuple[int, ...]:
    """`version` for comparing: its leading numbers; empty: it has none."""
    numbers: list[int] = []
    for part in version.lstrip("v").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)

"""The contract: which names of the engine the adapter uses, read from `contract.toml`."""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from diptych_engine.tensorrt_llm.versions import Version, has_begun

UNSAID = "..."
"""Stands for a default that the contract does not tell."""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A field or a parameter."""

    kind: str
    default: str | int | float | bool = UNSAID
    since: str = "0"
    until: str = ""
    optional: bool = False
    values: tuple[str, ...] = ()
    """Members of its closed set."""
    accepted: tuple[str, ...] = ()
    """Values it must take when it is set: checked by making one."""
    place: int | None = None
    variadic: bool = False


class Method(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A method, by its parameters."""

    parameters: dict[str, Item] = msgspec.field(default_factory=dict)
    optional: bool = False
    since: str = "0"


class Class(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class, by what the adapter uses of it."""

    path: str
    """`module:name`."""
    fields: dict[str, Item] = msgspec.field(default_factory=dict)
    methods: dict[str, Method] = msgspec.field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    told_by_instances: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    subclass_of: str = ""


class Contract(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    engine: str
    versions: str
    classes: dict[str, Class]

    def fields_of(self, name: str, version: Version) -> frozenset[str]:
        """The fields of a class at `version`."""
        return frozenset(at(self.classes[name].fields, version))


def at(items: dict[str, Item], version: Version) -> dict[str, Item]:
    """Those of `items` that `version` has."""
    return {
        name: item
        for name, item in items.items()
        if has_begun(version, item.since) and not (item.until and has_begun(version, item.until))
    }


def read_contract(text: str) -> Contract:
    """The contract written as TOML. Raises `msgspec.ValidationError` if it is none."""
    return msgspec.convert(tomllib.loads(text), Contract)


def contract_text() -> str:
    """`contract.toml` as it is shipped."""
    return files("diptych_engine.tensorrt_llm").joinpath("contract.toml").read_text()


@cache
def shipped_contract() -> Contract:
    """The contract that the adapter is written for."""
    return read_contract(contract_text())


@dataclass(slots=True)
class Names:
    """What was used of an engine, by class: to be held against a contract."""

    used: dict[str, set[str]] = field(default_factory=dict)

    def add(self, owner: str, *names: str) -> None:
        """`names` of class `owner` were used."""
        self.used.setdefault(owner, set()).update(names)

    def beyond(self, contract: Contract, version: Version) -> list[str]:
        """Those that the contract does not know at `version`, as `class.name`."""
        return sorted(
            f"{owner}.{name}"
            for owner, names in self.used.items()
            for name in names - _known(contract.classes.get(owner), version)
        )


def _known(told: Class | None, version: Version) -> set[str]:
    if told is None:
        return set()
    known: set[str] = {*at(told.fields, version), *told.attributes, *told.members}
    known.update(told.told_by_instances)
    for name, method in told.methods.items():
        known.add(name)
        known.update(f"{name}({parameter})" for parameter in at(method.parameters, version))
    return known


def default_of(item: Item) -> Any:
    """The default that the contract tells; `UNSAID` if it does not."""
    return None if item.default == "None" else item.default

"""Bytes that were once on the wire must stay readable, and mean the same."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import diptych_contracts
from diptych_contracts.wire import Message, decode, encode

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(GOLDEN.glob("*.msgpack"))


def kinds_by_tag() -> dict[str, type[Message]]:
    for module in pkgutil.iter_modules(diptych_contracts.__path__, "diptych_contracts."):
        importlib.import_module(module.name)
    return {str(kind.__struct_config__.tag): kind for kind in Message.__subclasses__()}


KINDS = kinds_by_tag()


def tagged(value: Any) -> list[str]:
    """The `type` of every map in a plain MessagePack value."""
    if isinstance(value, dict):
        return [value["type"], *(t for v in value.values() for t in tagged(v))]
    return [t for v in value for t in tagged(v)] if isinstance(value, list) else []


def same_map(data: bytes, golden: bytes) -> bool:
    """Key for key, in order: a struct that has grown beyond 15 fields has a longer map header."""
    ours, theirs = msgspec.msgpack.decode(data), msgspec.msgpack.decode(golden)
    return list(ours) == list(theirs) and ours == theirs and data[-1:] == golden[-1:]


def test_every_message_has_a_golden_file_and_every_file_a_message() -> None:
    assert {path.stem for path in FILES} == set(KINDS), "run python tests/wire/write_goldens.py"


def test_tags_carry_a_version_and_name_one_message_each() -> None:
    assert len(KINDS) == len(Message.__subclasses__())
    for tag in KINDS:
        name, _, version = tag.rpartition(".")
        assert name.replace("_", "").isalpha()
        assert int(version) >= 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_bytes_decode_and_encode_to_the_same_bytes(path: Path) -> None:
    data = path.read_bytes()
    assert same_map(encode(decode(data, KINDS[path.stem])), data)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_any_messagepack_client_can_read_it(path: Path) -> None:
    plain = msgspec.msgpack.decode(path.read_bytes())

    assert plain["type"] == path.stem
    assert set(tagged(plain)) <= set(KINDS)
    assert {"type"} < set(plain)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_field_of_a_later_version_is_passed_over(path: Path) -> None:
    data = path.read_bytes()
    later = msgspec.msgpack.encode(msgspec.msgpack.decode(data) | {"from_the_future": [1]})
    assert same_map(encode(decode(later, KINDS[path.stem])), data)

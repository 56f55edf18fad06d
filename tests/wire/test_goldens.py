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


def plain(data: bytes) -> Any:
    """What any MessagePack client reads."""
    return msgspec.msgpack.decode(data)


def tagged(value: Any) -> list[str]:
    """The `type` of every map in a plain MessagePack value."""
    if isinstance(value, dict):
        return [value["type"], *(t for v in value.values() for t in tagged(v))]
    return [t for v in value for t in tagged(v)] if isinstance(value, list) else []


def test_every_message_has_a_golden_file_and_every_file_a_message() -> None:
    assert {path.stem for path in FILES} == set(KINDS), "run python tests/wire/write_goldens.py"


def test_tags_carry_a_version_and_name_one_message_each() -> None:
    assert len(KINDS) == len(Message.__subclasses__())
    for tag in KINDS:
        name, _, version = tag.rpartition(".")
        assert name.replace("_", "").isalpha()
        assert int(version) >= 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_bytes_decode_and_encode_to_the_same_map(path: Path) -> None:
    """Not to the same bytes: with more than 15 fields msgspec writes a map's head in two bytes."""
    data = path.read_bytes()
    assert plain(encode(decode(data, KINDS[path.stem]))) == plain(data)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_any_messagepack_client_can_read_it(path: Path) -> None:
    message = plain(path.read_bytes())

    assert message["type"] == path.stem
    assert set(tagged(message)) <= set(KINDS)
    assert {"type"} < set(message)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_field_of_a_later_version_is_passed_over(path: Path) -> None:
    data = path.read_bytes()
    later = msgspec.msgpack.encode(plain(data) | {"from_the_future": [1]})
    assert plain(encode(decode(later, KINDS[path.stem]))) == plain(data)

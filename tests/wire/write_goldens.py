"""Writes the golden file of every message that has none: `python tests/wire/write_goldens.py`.

A golden file holds a message with every field set, as it went over the wire when the message was
first released. It is never rewritten afterwards: a field that comes later has a default, so the old
bytes stay valid. `--rewrite` is for messages no release has sent yet.
"""

import importlib
import pkgutil
import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

import diptych_contracts
from diptych_contracts.wire import Message, encode

GOLDEN = Path(__file__).parent / "golden"


def message_types() -> list[type[Message]]:
    for module in pkgutil.iter_modules(diptych_contracts.__path__, "diptych_contracts."):
        importlib.import_module(module.name)
    return sorted(Message.__subclasses__(), key=lambda kind: kind.__struct_config__.tag)


def sample(kind: type[Message]) -> Message:
    """A message of type `kind` with every field set, and none at its default."""
    values = {}
    for number, field in enumerate(msgspec.structs.fields(kind), start=1):
        value = _value(field.type, field.name, number)
        if value == field.default:
            value = not value if isinstance(value, bool) else _value(field.type, "other", 77)
        assert value != field.default, f"{kind.__name__}.{field.name} stands at its default"
        values[field.name] = value
    return kind(**values)


def _value(hint: Any, name: str, number: int) -> Any:
    hint = getattr(hint, "__supertype__", hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(next(a for a in arguments if a is not type(None)), name, number)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return (_value(arguments[0], name, number), _value(arguments[0], name, number + 1000))
    if issubclass(hint, Message):
        return sample(hint)
    if issubclass(hint, Enum):
        return list(hint)[1 if name == "other" else -1]
    plain = {str: f"{name}-{number}", int: 100 + number, float: number + 0.5, bool: True}
    plain[bytes] = b"\x00\xff" + name.encode()
    return plain[hint]


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for kind in message_types():
        path = GOLDEN / f"{kind.__struct_config__.tag}.msgpack"
        if "--rewrite" in sys.argv[1:] or not path.exists():
            path.write_bytes(encode(sample(kind)))
            print(f"wrote {path.name}")  # noqa: T201


if __name__ == "__main__":
    main()

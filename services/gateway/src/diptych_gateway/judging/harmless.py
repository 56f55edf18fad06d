"""Parameters that are not supported, and what else is refused by name."""

from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from diptych_contracts.errors import InvalidRequest

Choice = TypeVar("Choice", bound=StrEnum)

_HARMLESS_BYTES = 1024
"""More than any of the harmless values, with generous spaces."""
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""What these parameters may say while they are not supported: nothing that changes an answer."""

SUCCESSORS = {"functions": "tools", "function_call": "tool_choice", "best_of": "n"}


def only(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise `InvalidRequest` unless `value` (as JSON or plain) is absent or one of `allowed`."""
    if isinstance(value, msgspec.Raw):
        value = _plain(value)
    if value is None or any(value == a and type(value) is type(a) for a in allowed):
        return
    raise unsupported(name, value, allowed)


class _Long(str):
    """JSON that is too long to be looked at."""

    __slots__ = ()
    __repr__ = str.__str__


def _plain(value: msgspec.Raw) -> Any:
    data = bytes(value)
    if len(data) <= _HARMLESS_BYTES:
        with suppress(RecursionError, msgspec.DecodeError):
            return msgspec.json.decode(data)
    return _Long(data[:_HARMLESS_BYTES].decode("utf-8", "replace"))


def unsupported(name: str, value: Any, allowed: tuple[Any, ...]) -> InvalidRequest:
    """What a client is told about a parameter that is not supported."""
    options = " or ".join([*(repr(a) for a in allowed), "nothing"])
    message = f"'{name}' is not supported: expected {options}, saw {shown(value)}"
    if name in SUCCESSORS:
        message += f"; '{SUCCESSORS[name]}' has taken its place"
    return InvalidRequest(message, param=name, code="unsupported_parameter")


def one_of(kind: type[Choice], value: str, name: str) -> Choice:
    """`value` as one of a closed set. Raises `InvalidRequest`, which names them all."""
    try:
        return kind(value)
    except ValueError:
        choices = " or ".join(repr(str(choice)) for choice in kind)
        message = f"'{name}': expected {choices}, saw {shown(value)}"
        raise InvalidRequest(message, param=name) from None


def shown(value: Any) -> str:
    """`value` for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

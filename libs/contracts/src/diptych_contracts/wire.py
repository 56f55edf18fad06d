"""MessagePack on the wire: one encoder, one decoder per type.

Any MessagePack client can read a message: it is a map whose key `type` names the struct and its
schema version (`token_frame.1`). Fields are added with defaults and never renamed.
"""

from functools import cache
from typing import Any

import msgspec

from diptych_contracts.errors import Permanent

HIDDEN = frozenset({"secret", "voice", "sealing_key"})
"""Fields whose values are shown nowhere: not in a log, an assertion or `diptych tap`."""

_encoder = msgspec.msgpack.Encoder()


def _shown(name: str, value: object) -> str:
    return f"<{name}>" if name in HIDDEN and value else repr(value)


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A typed message. Subclasses set `tag="<name>.<version>"`."""

    def __repr__(self) -> str:
        """Everything but what nobody may read over a shoulder: `HIDDEN`."""
        told = (f"{name}={_shown(name, getattr(self, name))}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(told)})"


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: Message) -> bytes:
    """`message` as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """`data` as `kind`: a message type, or a union of tagged ones.

    Raises:
        Permanent: if `data` is not such a message; says what was wrong.
    """
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as err:
        name = getattr(kind, "__name__", str(kind))
        raise Permanent(f"expected a {name} message, got {len(data)} bytes: {err!s:.300}") from err

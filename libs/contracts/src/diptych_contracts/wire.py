"""MessagePack on the wire: one encoder, one decoder per type.

Any MessagePack client can read a message: it is a map whose key `type` names the struct and its
schema version (`token_frame.1`). Fields are added with defaults and never renamed.
"""

from functools import cache
from typing import Any

import msgspec

from diptych_contracts.errors import Permanent

_encoder = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A typed message. Subclasses set `tag="<name>.<version>"`."""


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

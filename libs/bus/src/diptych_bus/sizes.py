"""The size limit, checked before sending.

The server answers a message above its limit by closing the connection, and nats-py checks only the
payload: the caller would see a time-out (measured).
"""

from collections.abc import Mapping

from diptych_contracts.errors import Permanent
from diptych_contracts.streams import MAX_MESSAGE_BYTES

_PREAMBLE_BYTES = len(b"NATS/1.0\r\n\r\n")
_PER_HEADER_BYTES = len(b": \r\n")


def message_bytes(data: bytes, headers: Mapping[str, str] | None) -> int:
    """Size of payload and headers as the server counts them."""
    if not headers:
        return len(data)
    lines = sum(len(k.encode()) + len(v.encode()) + _PER_HEADER_BYTES for k, v in headers.items())
    return len(data) + lines + _PREAMBLE_BYTES


def check_size(subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Refuse a message the server would not take.

    Raises:
        Permanent: if payload and headers exceed `MAX_MESSAGE_BYTES`.
    """
    size = message_bytes(data, headers)
    if size > MAX_MESSAGE_BYTES:
        raise Permanent(
            f"message on {subject} has {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        )

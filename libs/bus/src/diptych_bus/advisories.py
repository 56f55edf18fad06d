"""What the server says of its own accord, as types."""

import msgspec

from diptych_bus.port import Delivery
from diptych_contracts.errors import Permanent


class Undelivered(msgspec.Struct, frozen=True):
    """A message that was delivered as often as its consumer allows, and never acknowledged.

    It stays in its stream, and nobody is told of it again: `subjects.undelivered`.
    """

    stream: str
    consumer: str
    stream_seq: int
    deliveries: int

    def encoded(self) -> bytes:
        """As the server writes it."""
        return msgspec.json.encode(self)


def undelivered(delivery: Delivery) -> Undelivered:
    """What `delivery` says. Raises `Permanent` if it is no such word."""
    try:
        return msgspec.json.decode(delivery.data, type=Undelivered)
    except msgspec.DecodeError as err:
        text = f"expected an advisory on {delivery.subject}, got {len(delivery.data)} bytes: {err}"
        raise Permanent(text) from err

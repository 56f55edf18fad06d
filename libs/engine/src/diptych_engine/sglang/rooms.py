"""Rooms, where the two legs of a request meet. Each is used once."""

from collections import OrderedDict
from random import Random, SystemRandom

import msgspec

from diptych_contracts.errors import Incompatible, Permanent
from diptych_engine.over_http.reading import from_json

FAKE_HOST = "2.2.2.2"
"""SGLang's own health checks and warm-up go there: a request that does is never computed."""
_ROOM_BITS = 63
_REMEMBERED = 65_536


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Where decode finds what prefill computes. What a hand-off of SGLang consists of."""

    host: str
    port: int
    room: int


class Rooms:
    """Makes rooms of one bootstrap server.

    Args:
        host, port: Where decode's server reaches it.
        rng: Random numbers: other adapters make rooms too, and none may meet.
    """

    def __init__(self, host: str, port: int, rng: Random | None = None) -> None:
        self.host = host
        self.port = port
        self._rng = rng or SystemRandom()
        self._used: OrderedDict[int, None] = OrderedDict()

    def fresh(self) -> Room:
        """A room nobody was in."""
        room = self._rng.getrandbits(_ROOM_BITS)
        while room in self._used:
            room = self._rng.getrandbits(_ROOM_BITS)
        self._used[room] = None
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)
        return Room(host=self.host, port=self.port, room=room)


def see_host(host: str) -> None:
    """Raises `Permanent` if no decode server could find a prefill server at `host`."""
    if host in ("", FAKE_HOST, "0.0.0.0", "::"):
        raise Permanent(f"bootstrap_host {host!r}: expected where decode's server reaches this one")


def to_opaque(room: Room) -> bytes:
    """As it travels."""
    return msgspec.json.encode(room)


def from_opaque(data: bytes) -> Room:
    """The room of a hand-off. Raises `Incompatible` if it is none."""
    try:
        room: Room = from_json(data, Room)
    except msgspec.DecodeError as err:
        raise Incompatible(f"no room of SGLang: {err}") from err
    return room

"""JetStream's answers, and its errors as ours."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg

from diptych_bus.jetstream.connection import Connection
from diptych_bus.port import Stored
from diptych_bus.stream_names import API
from diptych_contracts.errors import Conflict, DiptychError, Permanent, StoreFull, Transient

WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
NAME_IN_USE = 10058
NOT_FOUND = frozenset({10014, 10043, 10057, 10059})
"""Consumer, message (two ways), stream."""
NO_ROOM = frozenset({10002, 10023, 10047})
"""The account's, the server's memory's, the server's disk's limit."""
NO_PEERS = 10005
"""A cluster that just lost a server, or is not whole yet; it has the code of a wrong request."""
STORE_FAILED = 10077
"""A stream's or bucket's own limit, if the text says so; a rewritten key needs room too (seen)."""


@dataclass(frozen=True, slots=True)
class ApiError(Exception):
    """An error answer, not judged yet."""

    code: int
    err_code: int
    description: str

    def judged(self, what: str) -> DiptychError:
        """As one of ours: what may work later is `Transient`."""
        message = f"{what}: {self.description} ({self.err_code})"
        if self.err_code in WRONG_LAST_SEQUENCE:
            return Conflict(message)
        limit = self.err_code == STORE_FAILED and self.description.startswith("maximum")
        if limit or self.err_code in NO_ROOM:
            return StoreFull(message)
        wrong = self.code == 400 and self.err_code != NO_PEERS
        return Permanent(message) if wrong else Transient(message)


def status(msg: Msg) -> str | None:
    """A control message's status code; None for a real message."""
    return msg.headers.get("Status") if msg.headers else None


def parsed(msg: Msg) -> dict[str, Any]:
    """A JSON answer. Raises `ApiError` if it says so."""
    body: dict[str, Any] = json.loads(msg.data) if msg.data else {}
    error = body.get("error")
    if error is not None:
        raise ApiError(
            int(error.get("code", 500)),
            int(error.get("err_code", 0)),
            str(error.get("description", "")),
        )
    return body


async def api(
    connection: Connection, subject: str, body: Mapping[str, Any], *, timeout_s: float
) -> dict[str, Any]:
    """Ask JetStream's API. Raises `ApiError` for its own errors, `BusAway`, `Transient`."""
    msg = await connection.ask(f"{API}.{subject}", json.dumps(body).encode(), timeout_s=timeout_s)
    return parsed(msg)


async def stored(
    connection: Connection,
    subject: str,
    data: bytes,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
) -> Stored:
    """Publish with an id and wait for the PubAck, sending again within the deadline.

    Raises:
        BusAway: unknown whether it is stored.
        StoreFull: refused, there is no room.
        Transient: refused, may work later (starting up).
        Conflict: the expected last sequence is another.
    """
    msg = await connection.ask(subject, data, headers=headers, timeout_s=timeout_s)
    try:
        ack = parsed(msg)
    except ApiError as err:
        raise err.judged(subject) from err
    return Stored(seq=int(ack["seq"]), duplicate=bool(ack.get("duplicate", False)))

"""An answer's way out: as events over some outlet, or whole.

A chat stream begins with its first token (or the first keep-alive, if that is due earlier), so its
client can still be given a status until then; a response begins at once, with its id.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from starlette.types import Send

from diptych_gateway.answering.answers import KEEP_ALIVE
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_gateway.errors import ApiError
from diptych_gateway.listening.reading import JSON

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventWriter(Protocol):
    """Makes the events of one answer, each ready for its outlet."""

    def start(self) -> list[bytes]:
        """What comes before any token."""
        ...

    def texts(self, pieces: Iterable[Shown]) -> list[bytes]:
        """Pieces of text, each with the index of its token."""
        ...

    def last(self, stream: AnswerStream) -> list[bytes]:
        """The end, once there is one."""
        ...

    def failed(self, failure: ApiError) -> list[bytes]:
        """Word that this gateway will not deliver the rest."""
        ...


class Outlet(Protocol):
    """A client's connection."""

    async def begin(self) -> None:
        """Before the first event."""
        ...

    async def write(self, events: list[bytes], *, last: bool) -> None:
        """Send events; waits for a slow client."""
        ...

    async def ping(self) -> None:
        """Send a sign of life."""
        ...


class EventStream:
    """Server-sent events in the body of an HTTP response."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self) -> None:
        """Send the head."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})

    async def write(self, events: list[bytes], *, last: bool) -> None:
        """Send all events with one write."""
        body = b"".join(events)
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def ping(self) -> None:
        """Send a comment line."""
        await self.write([KEEP_ALIVE], last=False)


async def nothing() -> None:
    """Do nothing."""


async def deliver(
    stream: AnswerStream,
    writer: EventWriter,
    outlet: Outlet,
    *,
    at_once: bool = False,
    before_end: Callable[[], Awaitable[None]] = nothing,
) -> None:
    """Send the answer as it grows; returns early if the client leaves.

    Args:
        stream: The answer.
        writer: Makes its events.
        outlet: Sends them.
        at_once: Begin without waiting for a token; then an end of any kind is the writer's.
        before_end: Awaited before the end is sent.

    Raises:
        ApiError: it failed before its first byte.
    """
    begun = at_once
    stream.eager = True
    if at_once:
        stream.wake.set()
        await outlet.begin()
        await _write(stream, outlet, writer.start(), last=False)
    while not stream.gone:
        await stream.news()
        if stream.failure is not None and not begun:
            raise stream.failure
        events = writer.texts(stream.texts())
        over = stream.over
        if not begun and (events or over or stream.ping):
            begun = True
            events = [*writer.start(), *events]
            await outlet.begin()
        if over:
            if stream.end is not None:
                await before_end()
            await _write(stream, outlet, events + _last(stream, writer), last=True)
            return
        if events:
            await _write(stream, outlet, events, last=False)
        elif stream.ping:
            stream.patience.sending()
            await outlet.ping()
            stream.patience.sent()
        stream.ping = False


async def until_over(stream: AnswerStream) -> None:
    """Wait until the answer is complete or the client leaves."""
    while stream.end is None and stream.failure is None and not stream.gone:
        await stream.news()


async def deliver_whole(stream: AnswerStream) -> list[Shown] | None:
    """The answer's pieces once it is complete; None if the client left.

    Raises:
        ApiError: it failed.
    """
    await until_over(stream)
    if stream.gone:
        return None
    if stream.failure is not None:
        raise stream.failure
    pieces: list[Shown] = []
    while not stream.over:
        pieces += stream.texts()
        await asyncio.sleep(0)  # a long answer must not keep the loop to itself
    return pieces


async def send_json(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send one JSON object."""
    head = [
        (b"content-type", JSON.encode()),
        (b"content-length", str(len(body)).encode()),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error object."""
    await send_json(send, error.status, error.body, error.headers)


async def send_refusal(send: Send, error: ApiError) -> None:
    """Send an error object instead of accepting a WebSocket."""
    head = [(b"content-type", JSON.encode()), *error.headers]
    start = {"type": "websocket.http.response.start", "status": error.status, "headers": head}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": error.body})


def _last(stream: AnswerStream, writer: EventWriter) -> list[bytes]:
    if stream.end is not None:
        return writer.last(stream)
    assert stream.failure is not None
    return writer.failed(stream.failure)


async def _write(stream: AnswerStream, outlet: Outlet, events: list[bytes], *, last: bool) -> None:
    stream.patience.sending()
    await outlet.write(events, last=last)
    stream.patience.sent()
    if stream.wake.is_set():
        await asyncio.sleep(0)  # nor may a long backlog

"""An answer's way out: as server-sent events, or whole.

Both raise `ApiError` while the client can still be given a status. A stream therefore begins with
its first token, or with the first keep-alive if that is due earlier.
"""

import asyncio

from starlette.types import Send

from diptych_gateway.answers import KEEP_ALIVE, ChunkWriter, completion
from diptych_gateway.errors import ApiError
from diptych_gateway.reading import JSON
from diptych_gateway.streams import AnswerStream

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def deliver_events(stream: AnswerStream, send: Send, *, include_usage: bool) -> None:
    """Send the answer as it grows; returns early if the client leaves.

    Raises:
        ApiError: it failed before its first byte.
    """
    writer = ChunkWriter(stream.heading, include_usage=include_usage)
    begun = False
    stream.eager = True
    while not stream.gone:
        await stream.news()
        failure = stream.failure
        if failure is not None and not begun:
            raise failure
        data = b"".join([writer.text(index, text) for index, text in stream.texts()])
        over = stream.over
        if not begun and (data or over or stream.ping):
            begun = True
            data = writer.start() + data
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        if over:
            await _send(stream, send, data + _last_events(stream, writer), more=False)
            return
        if stream.ping:
            stream.ping = False
            data = data or KEEP_ALIVE
        if data:
            await _send(stream, send, data, more=True)


async def deliver_whole(stream: AnswerStream, send: Send) -> None:
    """Send the answer once it is complete; returns early if the client leaves.

    Raises:
        ApiError: it failed.
    """
    while stream.end is None and stream.failure is None:
        await stream.news()
        if stream.gone:
            return
    if stream.failure is not None:
        raise stream.failure
    pieces: list[str] = []
    while not stream.over:
        pieces += [piece for _, piece in stream.texts()]
        await asyncio.sleep(0)  # a long answer must not keep the loop to itself
    text = "".join(pieces)
    body = completion(
        stream.heading, text=text, finish_reason=_finish_reason(stream), used=stream.usage
    )
    await send_json(send, 200, body)


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


def _last_events(stream: AnswerStream, writer: ChunkWriter) -> bytes:
    if stream.failure is not None:
        return writer.error(stream.failure.body)
    return writer.finish(stream.last_index, _finish_reason(stream), stream.usage)


def _finish_reason(stream: AnswerStream) -> str:
    assert stream.end is not None
    return stream.end.reason.value


async def _send(stream: AnswerStream, send: Send, data: bytes, *, more: bool) -> None:
    stream.patience.sending()
    await send({"type": "http.response.body", "body": data, "more_body": more})
    stream.patience.sent()
    if stream.wake.is_set():
        await asyncio.sleep(0)  # nor may a long backlog

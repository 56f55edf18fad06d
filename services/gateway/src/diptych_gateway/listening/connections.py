"""Clients' connections: limits until a request's head is there, half-closed clients, last words.

uvicorn parses and frames; what it leaves open is closed here. A head has a size, a number of fields
and a time. Whatever is no HTTP gets an error object. A client that has sent everything and closed
its side gets its answer: whether it is still there, only sending it something can tell.
"""

import asyncio
from http import HTTPStatus
from random import SystemRandom
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame
from websockets.http11 import Response

from diptych_contracts.ids import new_request_id
from diptych_gateway import metrics
from diptych_gateway.errors import ApiError
from diptych_gateway.listening.reading import JSON
from diptych_gateway.listening.unfinished import Unfinished

MAX_HEAD_BYTES = 64 * 1024
MAX_FIELDS = 100
HEAD_S = 10.0
"""How long a head may take, from its first byte."""
LINGER_S = 10.0
"""How long a client may go on sending a body after its answer."""
_DEAF_S = 2.0
"""How long a refused client is listened to, so that a reset does not overtake its answer."""
_BODY_OVERHEAD = 16
"""Bytes on the wire for a byte of a chunked body: one-byte chunks need six."""
_PROBES_S = (0.25, 1.0, 5.0)
"""Between signs of life to a half-closed client; the last one repeats."""
MAX_FRAGMENTS = 1024
"""Of one WebSocket message."""
MAX_UNREAD_BYTES = 256 * 1024
"""Answers to pings that a client may leave unread."""
_NO_TEXT, _TOO_BIG, _TRY_AGAIN_LATER = 1007, 1009, 1013
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_rng = SystemRandom()


class HttpConnection(HttpToolsProtocol):
    """One client's connection; `abort` in a scope's state cuts it.

    `close` alone would wait for a client that reads nothing.
    """

    max_connections = 4096
    """Of one server, WebSockets included; it makes a class of its own with its limits."""
    slow_reader_s = 30.0
    """A client that takes nothing of what waits for it is cut off after this time, or twice it."""
    last = False
    """Whether its next request is its last."""
    _begun = False
    """Whether a head has begun and is not complete."""
    _in_body = False
    _heads = 0
    _head_bytes = 0
    _fields = 0
    _wire_bytes = 0
    _body_bytes = 0
    _deaf = False
    _half_closed = False
    _refusal: ApiError | None = None
    _timer: asyncio.TimerHandle | None = None
    """Of the head, of a body nobody needs, or of the next sign of life: never two at once."""
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._deaf = True
            transport.write(_answer(_too_many(self.max_connections)))
            transport.close()
            return
        self._idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._forget_unread()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # What comes in

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        heads, in_body = self._heads, self._in_body
        super().data_received(data)
        if self._deaf or self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self._heads == heads and self._in_body == in_body:
            self._count(len(data))
        if not (self._begun or self._in_body or self._busy):
            self._idle()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort"] = self.transport.abort
        self._begun, self._fields, self._head_bytes = True, 0, 0
        self._set_timer(HEAD_S, self._head_is_late)

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._grow(len(name) + len(value))
        if not self._in_body:  # trailers are read and dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._set_timer(None)
        self._heads += 1
        self._begun, self._in_body = False, True
        self._head_bytes = self._wire_bytes = self._body_bytes = 0
        super().on_headers_complete()
        if self.last and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._set_timer(None)
        super().on_message_complete()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for an answer that is under way."""
        whole = not self._in_body and self._busy
        if not whole or self.cycle.scope["http_version"] == "1.0":  # which knows no sign of life
            return None
        self._half_closed = True
        self._look(0)
        return True

    # What goes out

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._busy:
            return
        if self._half_closed or self._deaf:
            self.transport.close()
        elif self._in_body:
            self._set_timer(LINGER_S, self.transport.close)

    def pause_writing(self) -> None:
        """Watch what waits for the client: answers of any kind may be megabytes."""
        super().pause_writing()
        self._watch_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._forget_unread()
        super().resume_writing()

    def _watch_unread(self, n_bytes: int) -> None:
        self._unread = self.loop.call_later(self.slow_reader_s, self._look_at_unread, n_bytes)

    def _look_at_unread(self, before_bytes: int) -> None:
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes >= before_bytes:
            self.transport.abort()
        else:
            self._watch_unread(left_bytes)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what came in, with what `_refusal` says or as no HTTP."""
        self._deaf = True
        self._set_timer(None)
        if self._busy:
            self.cycle.keep_alive = False
            if not self._in_body:  # an earlier request is still being answered
                return
            if self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        text = "expected an HTTP/1.1 request, saw something else"
        error = self._refusal or ApiError(400, text, code="invalid_http")
        metrics.answered("other", error.status)
        self.transport.write(_answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(_DEAF_S, self.transport.close)

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self, tries: int) -> None:
        """Send a half-closed client a sign of life: one that is gone answers with a reset."""
        if self.transport.is_closing() or not self._busy:
            return
        if not self.cycle.response_started and not self.pipeline:
            self.transport.write(_CONTINUE)
        self.cycle.message_event.set()  # its stream sends one of its own, see `watched`
        self._set_timer(_PROBES_S[min(tries, len(_PROBES_S) - 1)], self._look, tries + 1)

    # Limits

    def _grow(self, size: int) -> None:
        """Count a part of a head; the parser turns the error into a refusal."""
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or self._fields > MAX_FIELDS:
            self._refusal = _too_large()
            raise self._refusal

    def _count(self, size: int) -> None:
        """Count what came in without completing anything: the parser may hold it."""
        if self._in_body:
            self._wire_bytes += size
            too_large = self._wire_bytes > MAX_HEAD_BYTES + _BODY_OVERHEAD * self._body_bytes
        else:
            self._head_bytes += size
            too_large = self._head_bytes > MAX_HEAD_BYTES
        if too_large:
            self._refusal = _too_large()
            self.send_400_response("")

    def _head_is_late(self) -> None:
        if self._busy:  # with the request before it
            self._set_timer(HEAD_S, self._head_is_late)
            return
        text = f"expected the whole head of a request within {HEAD_S:g} s"
        self._refusal = ApiError(408, text, code="head_timeout")
        self.send_400_response("")

    def _idle(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _set_timer(self, wait_s: float | None, *call: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait_s is None else self.loop.call_later(wait_s, *call)  # type: ignore[arg-type]


class SocketConnection(WebSocketsSansIOProtocol):
    """The same for WebSockets, whose head came through `HttpConnection`.

    uvicorn reads no further while the application has a message to take, and waits for a slow
    reader, except with what it keeps or sends by itself: fragments, and answers to pings.
    """

    unfinished: Unfinished
    """Of its server, which makes a class of its own."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.conn.reject = _rejection  # type: ignore[method-assign]
        self.app_state = {**self.app_state, "abort": self.transport.abort}

    def connection_lost(self, exc: Exception | None) -> None:
        self.unfinished.taken(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.handshake_complete and not self.close_sent:
            self.unfinished.grown(self, len(data))
        super().data_received(data)
        if not self.handshake_initiated and (refusal := b"".join(self.conn.data_to_send())):
            self.transport.write(refusal)
            self.transport.close()

    async def receive(self) -> Any:
        message = await super().receive()
        self.unfinished.taken(self)
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # else uvicorn logs an error of ours for each refusal

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(_TOO_BIG, "too many fragments")
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Close for text that is none: uvicorn would log each with its traceback."""
        if self.curr_msg_data_type == "text" and not _is_utf8(self.frames):
            self._fail(_NO_TEXT, "text that is not UTF-8")
            return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.transport.abort()

    def give_way(self) -> None:
        """Close: messages that are not complete take too much memory, and this one longest."""
        self._fail(_TRY_AGAIN_LATER, "too many unfinished messages")

    def _fail(self, code: int, reason: str) -> None:
        if self.close_sent:
            return
        self.frames = []
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.fail(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()


def _rejection(status: int, text: str) -> Response:
    """The answer to what wants to be a WebSocket and is none: an error object, not words."""
    text = text.strip().partition("\n")[0]
    match status:
        case HTTPStatus.METHOD_NOT_ALLOWED:
            error = ApiError(405, text, code="method_not_allowed")
        case HTTPStatus.REQUEST_URI_TOO_LONG | HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            error = ApiError(431, text, code="head_too_large")
        case _:
            error = ApiError(400, text, code="invalid_handshake")
    metrics.answered("other", error.status)
    phrase = HTTPStatus(error.status).phrase
    return Response(error.status, phrase, Headers(_fields(error)), error.body)


def _is_utf8(frames: list[bytes]) -> bool:
    try:
        b"".join(frames).decode()
    except UnicodeDecodeError:
        return False
    return True


def _too_large() -> ApiError:
    text = f"expected a head of at most {MAX_HEAD_BYTES} bytes and {MAX_FIELDS} fields, saw more"
    return ApiError(431, text, code="head_too_large")


def _too_many(limit: int) -> ApiError:
    text = f"{limit} connections are open, which is the limit"
    return ApiError(503, text, code="too_many_connections", retry_after_s=1.0)


def _answer(error: ApiError) -> bytes:
    head = "".join(f"{name}: {value}\r\n" for name, value in _fields(error).items())
    return b"%s%s\r\n%s" % (STATUS_LINE[error.status], head.encode(), error.body)


def _fields(error: ApiError) -> dict[str, str]:
    return {
        "content-type": JSON,
        "content-length": str(len(error.body)),
        "x-request-id": new_request_id(_rng),
        "connection": "close",
        **{name.decode(): value.decode() for name, value in error.headers},
    }

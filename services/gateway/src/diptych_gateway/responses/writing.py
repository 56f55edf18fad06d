"""The events of a response, framed for the connection they go out on."""

from collections.abc import Iterable

import msgspec

from diptych_gateway.answering.answers import DONE
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_gateway.errors import ApiError
from diptych_gateway.responses.events import Event
from diptych_gateway.responses.own_events import OwnEvents
from diptych_gateway.responses.turns import Turn


class _ErrorEvent(msgspec.Struct, kw_only=True):
    type: str = "error"
    sequence_number: int
    error: msgspec.Raw


class _ErrorFrame(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    status: int
    error: dict[str, object]
    stream_id: str | None = None


def sse(events: Iterable[Event]) -> list[bytes]:
    """Server-sent events; `id` is the number to go on after."""
    return [
        b"event: %b\nid: %d\ndata: %b\n\n" % (event.type.encode(), event.number, event.data)
        for event in events
    ]


class SseWriter:
    """Server-sent events of one response; the end mark follows the last."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def start(self) -> list[bytes]:
        """The response, in progress."""
        return sse(self._turn.events.start())

    def texts(self, pieces: Iterable[Shown]) -> list[bytes]:
        """A delta per piece of text."""
        delta = self._turn.delta
        return sse([event for shown in pieces for event in delta(shown)])

    def last(self, stream: AnswerStream) -> list[bytes]:
        """The end."""
        return [*sse(self._turn.events.finish(self._turn.answer())), DONE]

    def failed(self, failure: ApiError) -> list[bytes]:
        """An error of this gateway: not an event of the response, so it has no number of its own.

        It says the newest one again: the client goes on after that elsewhere.
        """
        number = max(0, self._turn.events.last_number)
        error = msgspec.Raw(msgspec.json.encode(failure.late_detail))
        data = msgspec.json.encode(_ErrorEvent(sequence_number=number, error=error))
        return [b"event: error\ndata: " + data + b"\n\n"]


class FrameWriter:
    """WebSocket text frames of one response, with our own events where they are asked for."""

    def __init__(self, turn: Turn, *, stream_id: str | None, own: OwnEvents | None = None) -> None:
        self._turn = turn
        self._stream_id = stream_id
        self._own = own

    def start(self) -> list[bytes]:
        """The response, in progress."""
        started = [event.data for event in self._turn.events.start()]
        return [*started, *self._news()]

    def texts(self, pieces: Iterable[Shown]) -> list[bytes]:
        """A delta per piece of text."""
        delta, news = self._turn.delta, self._news()
        return [*news, *(event.data for shown in pieces for event in delta(shown))]

    def last(self, stream: AnswerStream) -> list[bytes]:
        """The end."""
        events = self._turn.events
        own = [] if self._own is None else self._own.ended(events.last_number)
        return [*own, *(event.data for event in events.finish(self._turn.answer()))]

    def failed(self, failure: ApiError) -> list[bytes]:
        """An error of this gateway."""
        return [error_frame(failure, stream_id=self._stream_id)]

    def _news(self) -> list[bytes]:
        return [] if self._own is None else self._own.news(self._turn.events.last_number)


def error_frame(error: ApiError, *, stream_id: str | None = None) -> bytes:
    """An error on a WebSocket, which stays open."""
    detail = error.detail
    body: dict[str, object] = {
        "type": detail.type,
        "code": detail.code or detail.type,
        "message": detail.message,
        "param": detail.param,
    }
    if error.headers:
        body["headers"] = {name.decode(): value.decode() for name, value in error.headers}
    return msgspec.json.encode(
        _ErrorFrame(type="error", status=error.status, error=body, stream_id=stream_id)
    )

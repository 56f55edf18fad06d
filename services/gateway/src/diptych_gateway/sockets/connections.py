"""A client's WebSocket: requests in lanes, whatever they ask for.

A lane runs its requests one after another; lanes run side by side. An error is a frame, and the
socket stays open. What waits and what is under way is bounded, per connection and over all of them.
A connection takes requests for so long, and closes when the last is over.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opentelemetry import propagate
from starlette.types import Message, Receive, Scope, Send

from diptych_contracts.errors import DiptychError, InvalidRequest
from diptych_contracts.ids import RequestId
from diptych_contracts.requests import PriorityClass
from diptych_gateway.admission.generating import Arrival, Generations
from diptych_gateway.answering.delivering import EventWriter, deliver, nothing
from diptych_gateway.answering.streams import AnswerStream
from diptych_gateway.errors import ApiError, from_error
from diptych_gateway.listening.intake import Intake
from diptych_gateway.listening.reading import wants_resume
from diptych_gateway.responses.writing import error_frame
from diptych_gateway.sockets.budget import Budget
from diptych_gateway.tenancy.callers import Caller
from diptych_policy.admission import Admission
from diptych_telemetry import logger

MAX_LANES = 32
MAX_IN_FLIGHT = 16
"""Requests that have begun or wait in their lane, of all lanes together."""
_GOING_AWAY = 1001
_NO_CLASS = PriorityClass.INTERACTIVE
"""A connection has requests of any class."""

Lane = str | None
F = TypeVar("F")
Before = Callable[[], Any]

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketRoom:
    """What all WebSockets of a gateway share."""

    admission: Admission
    sockets: Admission
    """Counts connections."""
    waiting: Budget
    """Characters of frames that have begun or wait, of all connections."""
    generations: Generations
    intake: Intake
    new_id: Callable[[], RequestId]

    async def serve(
        self,
        connection: "Callable[..., Connection[Any]]",
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve one client with a `connection` of its own.

        Raises:
            ApiError: not upgraded: too many are open (429), or a header is wrong (400).
        """
        resume = wants_resume(scope["headers"])
        now_s = self.generations.now_s
        await receive()  # websocket.connect
        declined = self.sockets.enter(_NO_CLASS, now_s=now_s())
        if declined is not None:
            text = f"{self.sockets.limit} WebSockets are open, which is the limit"
            retry_after_s = declined.retry_after_s
            raise ApiError(429, text, code="too_many_sockets", retry_after_s=retry_after_s)
        try:
            await send({"type": "websocket.accept"})
            await connection(self, scope=scope, receive=receive, send=send, resume=resume).run()
        finally:
            self.sockets.leave(_NO_CLASS, now_s=now_s())


@dataclass(frozen=True, slots=True)
class Frame(Generic[F]):
    """A client's message."""

    body: F
    size: int
    """Characters it came in."""


class Connection(ABC, Generic[F]):
    """One client's socket."""

    def __init__(
        self,
        room: SocketRoom,
        *,
        scope: Scope,
        receive: Receive,
        send: Send,
        resume: bool,
    ) -> None:
        self.room = room
        self.resume = resume
        self.streams: set[AnswerStream] = set()
        """The answers under way."""
        self.gone = False
        self._receive = receive
        self._send = send
        self._abort: Callable[[], None] | None = scope["state"].get("abort")
        self._caller: Caller = scope["state"]["caller"]
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self._context = propagate.extract(headers)
        self._settings = room.generations.settings
        self._waiting: dict[Lane, deque[Frame[F]]] = {}
        self._lanes: set[str] = set()
        self._chars = 0
        """Of its frames that have begun or wait."""
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._expired = False

    @abstractmethod
    async def lane_of(self, text: str) -> Lane:
        """Whose turn `text` is. Raises `InvalidRequest`."""

    @abstractmethod
    async def decoded(self, text: str) -> F:
        """What `text` asks for. Raises `InvalidRequest`."""

    @abstractmethod
    async def answer(self, frame: Frame[F], lane: Lane) -> None:
        """Run one request to its end.

        Raises:
            DiptychError: it failed; the client is told.
        """

    def failed(self, body: F, lane: Lane) -> None:
        """A request has failed."""

    def closed(self) -> None:
        """The connection is gone."""

    async def run(self) -> None:
        """Serve until the client leaves or the connection's life is over."""
        try:
            async with asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(self._end_of_life())
                try:
                    while (message := await self._receive())["type"] != "websocket.disconnect":
                        await self._take(message, tasks)
                finally:
                    self._leave()
                    ending.cancel()
        finally:
            self.room.waiting.give_back(self._chars)
            self.closed()

    def arrival(self) -> Arrival:
        """A request's arrival, with an id of its own."""
        arrived_s = self.room.generations.now_s()
        return Arrival(self.room.new_id(), arrived_s, self._context, self._abort, self._caller)

    async def deliver(
        self,
        stream: AnswerStream,
        writer: EventWriter,
        *,
        at_once: bool = False,
        before_end: Before = nothing,
    ) -> None:
        """Send an answer as it grows, one text frame per event; see `delivering.deliver`."""
        with self.reading(stream):
            outlet = _Frames(self._send, stream)
            await deliver(stream, writer, outlet, at_once=at_once, before_end=before_end)

    def reading(self, stream: AnswerStream) -> "_Reading":
        """Tell `stream` inside the `with` if the client leaves."""
        return _Reading(self, stream)

    async def say(self, frame: bytes) -> None:
        """Send a frame."""
        await self._guarded({"type": "websocket.send", "text": frame.decode()})

    def _leave(self) -> None:
        self.gone = True
        self._waiting.clear()
        for stream in self.streams:
            stream.leave()

    async def _end_of_life(self) -> None:
        await asyncio.sleep(self._settings.socket_life_s)
        self._expired = True
        await self.say(error_frame(self._too_old()))
        await self._idle.wait()
        await self._guarded({"type": "websocket.close", "code": _GOING_AWAY})

    def _too_old(self) -> ApiError:
        text = f"a connection takes turns for {self._settings.socket_life_s:g} s: open a new one"
        return ApiError(400, text, code="websocket_connection_limit_reached")

    async def _take(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        """Put one frame into its lane, or say what is wrong with it."""
        lane: Lane = None
        try:
            text = _text(message)
            lane = await self.lane_of(text)
            frame = Frame(await self.decoded(text), len(text))
            self._admit(lane, frame.size)
        except DiptychError as err:
            await self.say(error_frame(from_error(err), stream_id=lane))
            return
        self._in_flight += 1
        self._chars += frame.size
        self._idle.clear()
        if lane in self._waiting:
            self._waiting[lane].append(frame)
        else:
            self._waiting[lane] = deque([frame])
            tasks.create_task(self._run(lane))

    def _admit(self, lane: Lane, size: int) -> None:
        if self._expired:
            raise self._too_old()
        limit = "websocket_stream_limit_reached"
        if lane is not None and lane not in self._lanes and len(self._lanes) >= MAX_LANES:
            text = f"a connection has at most {MAX_LANES} streams, saw another: '{lane}'"
            raise ApiError(429, text, code=limit, param="stream_id")
        if self._in_flight >= MAX_IN_FLIGHT:
            text = f"{MAX_IN_FLIGHT} requests are in flight on this connection, which is the limit"
            raise ApiError(429, text, code=limit)
        if not self.room.waiting.take(size):
            text = "turns that wait at this gateway take all the memory there is for them"
            now_s = self.room.generations.now_s()
            retry_after_s = self.room.admission.next_place_s(_NO_CLASS, now_s=now_s)
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=retry_after_s)
        if lane is not None:
            self._lanes.add(lane)

    async def _run(self, lane: Lane) -> None:
        waiting = self._waiting[lane]
        while waiting and not self.gone:
            frame = waiting.popleft()
            try:
                await self.answer(frame, lane)
            except DiptychError as err:
                self.failed(frame.body, lane)
                await self.say(error_frame(from_error(err), stream_id=lane))
            except Exception:
                log.exception("turn_crashed")
                failure = ApiError(500, "internal error", code="internal_error")
                await self.say(error_frame(failure, stream_id=lane))
            finally:
                self._in_flight -= 1
                self._chars -= frame.size
                self.room.waiting.give_back(frame.size)
                if not self._in_flight:
                    self._idle.set()
        if self._waiting.get(lane) is waiting:
            del self._waiting[lane]

    async def _guarded(self, message: Message) -> None:
        """Send; a client that takes nothing is cut off, one that left is left alone."""
        try:
            async with asyncio.timeout(self._settings.slow_reader_s):
                await self._send(message)
        except TimeoutError:
            if self._abort is not None:
                self._abort()
        except OSError:
            self.gone = True


class _Reading:
    """An answer that is read by a connection."""

    def __init__(self, connection: Connection[Any], stream: AnswerStream) -> None:
        self._connection = connection
        self._stream = stream

    def __enter__(self) -> None:
        if self._connection.gone:
            self._stream.leave()
        self._connection.streams.add(self._stream)

    def __exit__(self, *_: object) -> None:
        self._connection.streams.discard(self._stream)


class _Frames:
    """One text frame per event."""

    def __init__(self, send: Send, stream: AnswerStream) -> None:
        self._send = send
        self._stream = stream

    async def begin(self) -> None:
        """Nothing comes before the first event."""

    async def write(self, events: list[bytes], *, last: bool) -> None:
        """Send each event; the client may have left."""
        try:
            for event in events:
                await self._send({"type": "websocket.send", "text": event.decode()})
        except OSError:
            self._stream.leave()

    async def ping(self) -> None:
        """The protocol has pings of its own."""


def _text(message: Message) -> str:
    text: Any = message.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("expected a text frame, saw a binary one", code="invalid_json")
    return text

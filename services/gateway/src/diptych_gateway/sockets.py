"""`/v1/responses` as a WebSocket: many turns on one connection, in lanes.

A lane (`stream_id`; without one, the connection's own) runs its turns one after another; lanes run
side by side. Each event is one text frame, the same object as over HTTP, with the lane's id. An
error is a frame too, and the socket stays open. Turns that are not stored are remembered by the
connection, so that later ones can build on them.
"""

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from opentelemetry import propagate
from starlette.types import Message, Receive, Scope, Send

from diptych_contracts.errors import DiptychError, InvalidRequest
from diptych_contracts.ids import RequestId
from diptych_contracts.requests import PriorityClass
from diptych_gateway.admitting import admitted
from diptych_gateway.bodies import ABSENT
from diptych_gateway.budget import Budget
from diptych_gateway.callers import Caller
from diptych_gateway.delivering import deliver
from diptych_gateway.errors import ApiError, from_error
from diptych_gateway.generating import Arrival
from diptych_gateway.intake import Intake
from diptych_gateway.reading import wants_resume
from diptych_gateway.response_bodies import (
    CreateFrame,
    decode_create,
    decode_frame_kind,
    decode_text,
)
from diptych_gateway.response_checking import check_frame
from diptych_gateway.response_part_events import events_of
from diptych_gateway.response_writing import FrameWriter, error_frame
from diptych_gateway.streams import AnswerStream
from diptych_gateway.turns import Past, Turn, Turns, said
from diptych_policy.admission import Admission
from diptych_telemetry import logger

MAX_LANES = 32
MAX_IN_FLIGHT = 16
"""Turns that have begun or wait in their lane, of all lanes together."""
MAX_REMEMBERED = 32
_LANE = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_LANE_BYTES = 2048
"""More than the longest name, every letter escaped."""
_GOING_AWAY = 1001
_NO_CLASS = PriorityClass.INTERACTIVE
"""A connection has turns of any class."""

log = logger(__name__)

Lane = str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesSocket:
    """An ASGI application of one WebSocket route."""

    admission: Admission
    sockets: Admission
    """Counts connections."""
    waiting: Budget
    """Characters of frames that have begun or wait, of all connections."""
    remembered: Budget
    """Characters of conversations that connections know."""
    turns: Turns
    intake: Intake
    new_id: Callable[[], RequestId]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        resume = wants_resume(scope["headers"])
        now_s = self.turns.generations.now_s
        await receive()  # websocket.connect
        declined = self.sockets.enter(_NO_CLASS, now_s=now_s())
        if declined is not None:
            text = f"{self.sockets.limit} WebSockets are open, which is the limit"
            retry_after_s = declined.retry_after_s
            raise ApiError(429, text, code="too_many_sockets", retry_after_s=retry_after_s)
        try:
            await send({"type": "websocket.accept"})
            connection = _Connection(self, scope=scope, receive=receive, send=send, resume=resume)
            await connection.run()
        finally:
            self.sockets.leave(_NO_CLASS, now_s=now_s())


@dataclass(slots=True)
class _Memory:
    """Conversations the connection knows: by response id, with the lane that had it."""

    budget: Budget
    known: OrderedDict[str, tuple[Lane, Past]] = field(default_factory=OrderedDict)

    def pasts(self) -> dict[str, Past]:
        return {response_id: past for response_id, (_, past) in self.known.items()}

    def remember(self, response_id: str, lane: Lane, past: Past) -> None:
        """Remember one more; older ones of the connection give way, where there is no room."""
        while len(self.known) >= MAX_REMEMBERED:
            self._forget(next(iter(self.known)))
        while not self.budget.take(past.chars):
            if not self.known:
                log.warning("conversation_not_remembered", chars=past.chars)
                return
            self._forget(next(iter(self.known)))
        self.known[response_id] = (lane, past)

    def forget_all(self) -> None:
        """The connection is gone."""
        for response_id in list(self.known):
            self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        _, past = self.known.pop(response_id)
        self.budget.give_back(past.chars)

    def evict(self, response_id: str | None, lane: Lane) -> None:
        """A turn of `lane` that built on it has failed; a fork of another lane's leaves it."""
        if response_id is not None and self.known.get(response_id, (object(),))[0] == lane:
            self._forget(response_id)


@dataclass(frozen=True, slots=True)
class _Frame:
    frame: CreateFrame
    size: int
    """Characters it came in."""


class _Connection:
    """One client's socket."""

    def __init__(
        self,
        socket: ResponsesSocket,
        *,
        scope: Scope,
        receive: Receive,
        send: Send,
        resume: bool,
    ) -> None:
        self._socket = socket
        self._receive = receive
        self._send = send
        self._resume = resume
        self._abort: Callable[[], None] | None = scope["state"].get("abort")
        self._caller: Caller = scope["state"]["caller"]
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self._context = propagate.extract(headers)
        self._settings = socket.turns.generations.settings
        self._waiting: dict[Lane, deque[_Frame]] = {}
        self._lanes: set[str] = set()
        self._memory = _Memory(socket.remembered)
        self._chars = 0
        """Of its frames that have begun or wait."""
        self._streams: set[AnswerStream] = set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._expired = False
        self._gone = False

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
            self._socket.waiting.give_back(self._chars)
            self._memory.forget_all()

    def _leave(self) -> None:
        self._gone = True
        self._waiting.clear()
        for stream in self._streams:
            stream.leave()

    async def _end_of_life(self) -> None:
        await asyncio.sleep(self._settings.socket_life_s)
        self._expired = True
        await self._say(error_frame(self._too_old()))
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
            judged = self._socket.intake.judged
            kind = await judged(len(text), partial(decode_frame_kind, text))
            lane = _lane(kind.stream_id)
            if kind.type != "response.create":
                error = f"'type': expected 'response.create', saw {kind.type[:80]!r}"
                raise InvalidRequest(error, param="type")
            frame = _Frame(await judged(len(text), partial(decode_create, text)), len(text))
            self._admit(lane, frame.size)
        except DiptychError as err:
            await self._say(error_frame(from_error(err), stream_id=lane))
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
            text = f"{MAX_IN_FLIGHT} responses are in flight on this connection, which is the limit"
            raise ApiError(429, text, code=limit)
        if not self._socket.waiting.take(size):
            text = "turns that wait at this gateway take all the memory there is for them"
            now_s = self._socket.turns.generations.now_s()
            retry_after_s = self._socket.admission.next_place_s(_NO_CLASS, now_s=now_s)
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=retry_after_s)
        if lane is not None:
            self._lanes.add(lane)

    async def _run(self, lane: Lane) -> None:
        waiting = self._waiting[lane]
        while waiting and not self._gone:
            frame = waiting.popleft()
            try:
                await self._turn(frame, lane)
            except DiptychError as err:
                self._memory.evict(frame.frame.previous_response_id, lane)
                await self._say(error_frame(from_error(err), stream_id=lane))
            except Exception:
                log.exception("turn_crashed")
                failure = ApiError(500, "internal error", code="internal_error")
                await self._say(error_frame(failure, stream_id=lane))
            finally:
                self._in_flight -= 1
                self._chars -= frame.size
                self._socket.waiting.give_back(frame.size)
                if not self._in_flight:
                    self._idle.set()
        if self._waiting.get(lane) is waiting:
            del self._waiting[lane]

    async def _turn(self, asked: _Frame, lane: Lane) -> None:
        turns = self._socket.turns
        now_s = turns.generations.now_s
        arrived_s = now_s()
        frame = asked.frame
        judge = partial(check_frame, frame, resume=self._resume)
        call = await self._socket.intake.judged(asked.size, judge)
        came = Arrival(self._socket.new_id(), arrived_s, self._context, self._abort, self._caller)
        local = self._memory.pasts()
        with admitted(self._socket.admission, now_s, call.priority_class):
            if frame.generate is False:
                stored, past = await turns.warm_up(call, came, local=local)
                events = events_of(stored, stream_id=lane)
                assert stored.answer is not None
                for event in [*events.start(), *events.finish(stored.answer)]:
                    await self._say(event.data)
                self._memory.remember(stored.response_id, lane, past)
                return
            async with turns.new(call, came, local=local, stream_id=lane) as turn:
                await self._deliver(turn, lane)

    async def _deliver(self, turn: Turn, lane: Lane) -> None:
        stream = turn.stream
        if self._gone:
            stream.leave()
        self._streams.add(stream)
        try:
            await deliver(
                stream,
                FrameWriter(turn, stream_id=lane),
                _Frames(self._send, stream),
                at_once=True,
                before_end=partial(self._before_end, turn, lane),
            )
        finally:
            self._streams.discard(stream)

    async def _before_end(self, turn: Turn, lane: Lane) -> None:
        """Whoever hears of the end may build on it at once."""
        await self._socket.turns.settle(turn)
        if turn.stream.failure is not None:
            self._memory.evict(turn.stored.previous_response_id, lane)
        elif (asked := turn.asked) is not None:
            past = Past((*asked.messages, *said(turn.stored, turn.answer())), stored=asked.stored)
            self._memory.remember(turn.stored.response_id, lane, past)

    async def _say(self, frame: bytes) -> None:
        await self._guarded({"type": "websocket.send", "text": frame.decode()})

    async def _guarded(self, message: Message) -> None:
        """Send; a client that takes nothing is cut off, one that left is left alone."""
        try:
            async with asyncio.timeout(self._settings.slow_reader_s):
                await self._send(message)
        except TimeoutError:
            if self._abort is not None:
                self._abort()
        except OSError:
            self._gone = True


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


def _lane(stream_id: msgspec.Raw) -> Lane:
    if stream_id == ABSENT:
        return None
    data = bytes(stream_id)
    if len(data) <= _LANE_BYTES and data.startswith(b'"'):
        lane = decode_text(stream_id, at="stream_id")
        if _LANE.fullmatch(lane):
            return lane
    shown = data[:60].decode("utf-8", "replace")
    raise InvalidRequest(
        "'stream_id': expected 1 to 256 letters, digits, underscores, hyphens or periods, "
        f"saw {shown}",
        param="stream_id",
        code="invalid_stream_id",
    )

"""`/v1/responses` as a WebSocket: many turns on one connection, in lanes.

A lane (`stream_id`; without one, the connection's own) runs its turns one after another. Each event
is one text frame, the same object as over HTTP, with the lane's id. Turns that are not stored are
remembered by the connection, so that later ones can build on them.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.admission.admitting import admitted
from diptych_gateway.answering.delivering import until_over
from diptych_gateway.judging.bodies import ABSENT
from diptych_gateway.responses.bodies import (
    CreateFrame,
    decode_create,
    decode_frame_kind,
    decode_text,
)
from diptych_gateway.responses.checking import ResponseCall, check_frame
from diptych_gateway.responses.own_events import OwnEvents
from diptych_gateway.responses.part_events import events_of
from diptych_gateway.responses.turns import Past, Turn, Turns, said
from diptych_gateway.responses.writing import FrameWriter
from diptych_gateway.sockets.budget import Budget
from diptych_gateway.sockets.connections import (
    MAX_IN_FLIGHT,
    MAX_LANES,
    Connection,
    Frame,
    Lane,
    SocketRoom,
)
from diptych_telemetry import logger

__all__ = ["MAX_IN_FLIGHT", "MAX_LANES", "ResponsesSocket"]

MAX_REMEMBERED = 32
_LANE = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_LANE_BYTES = 2048
"""More than the longest name, every letter escaped."""

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesSocket:
    """An ASGI application of one WebSocket route."""

    room: SocketRoom
    turns: Turns
    remembered: Budget
    """Characters of conversations that connections know."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.room.serve(partial(_Connection, self), scope, receive, send)


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


class _Connection(Connection[CreateFrame]):
    """One client's socket."""

    def __init__(self, socket: ResponsesSocket, room: SocketRoom, **wire: Any) -> None:
        super().__init__(room, **wire)
        self._turns = socket.turns
        self._memory = _Memory(socket.remembered)

    async def lane_of(self, text: str) -> Lane:
        kind = await self.room.intake.judged(len(text), partial(decode_frame_kind, text))
        return _lane(kind.stream_id)

    async def decoded(self, text: str) -> CreateFrame:
        judged = self.room.intake.judged
        kind = await judged(len(text), partial(decode_frame_kind, text))
        if kind.type != "response.create":
            error = f"'type': expected 'response.create', saw {kind.type[:80]!r}"
            raise InvalidRequest(error, param="type")
        return await judged(len(text), partial(decode_create, text))

    def failed(self, body: CreateFrame, lane: Lane) -> None:
        self._memory.evict(body.previous_response_id, lane)

    def closed(self) -> None:
        self._memory.forget_all()

    async def answer(self, frame: Frame[CreateFrame], lane: Lane) -> None:
        body, came = frame.body, self.arrival()
        judge = partial(check_frame, body, resume=self.resume)
        call = await self.room.intake.judged(frame.size, judge)
        local = self._memory.pasts()
        with admitted(self.room.admission, self.room.generations.now_s, call.priority_class):
            if body.generate is False:
                async with self._turns.warming(call, came, local=local) as warming:
                    await self._warm_up(warming, lane)
                return
            async with self._turns.new(call, came, local=local, stream_id=lane) as turn:
                await self._deliver(turn, lane, self._own(call, turn, lane))

    def _own(self, call: ResponseCall, turn: Turn, lane: Lane) -> OwnEvents | None:
        if not call.events:
            return None
        queues = self.room.admission.queues
        now_s = self.room.generations.now_s
        return OwnEvents(turn.stored.response_id, turn.stream, queues, now_s, stream_id=lane)

    async def _warm_up(self, turn: Turn, lane: Lane) -> None:
        """Compute a prompt's KV, and say that it is there."""
        events = events_of(turn.stored, stream_id=lane)
        for event in events.start():
            await self.say(event.data)
        with self.reading(turn.stream):
            await until_over(turn.stream)
        if turn.stream.gone:
            return
        if turn.stream.failure is not None:
            raise turn.stream.failure
        warmed = await self._turns.warmed(turn)
        for event in events.finish(warmed):
            await self.say(event.data)
        if turn.asked is not None:
            self._memory.remember(turn.stored.response_id, lane, turn.asked)

    async def _deliver(self, turn: Turn, lane: Lane, own: OwnEvents | None) -> None:
        writer = FrameWriter(turn, stream_id=lane, own=own)
        before_end = partial(self._before_end, turn, lane)
        async with OwnEvents.watched(own):
            await self.deliver(turn.stream, writer, at_once=True, before_end=before_end)

    async def _before_end(self, turn: Turn, lane: Lane) -> None:
        """Whoever hears of the end may build on it at once."""
        await self._turns.settle(turn)
        if turn.stream.failure is not None:
            self._memory.evict(turn.stored.previous_response_id, lane)
        elif (asked := turn.asked) is not None:
            past = Past((*asked.messages, *said(turn.stored, turn.answer())), stored=asked.stored)
            self._memory.remember(turn.stored.response_id, lane, past)


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

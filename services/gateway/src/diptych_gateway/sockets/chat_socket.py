"""`/v1/chat/completions` as a WebSocket, for people who have no more than that.

A text frame is the body of a chat completion; the answer is what `data:` holds over SSE, one text
frame each, up to `[DONE]`. Requests run one after another. An error is a frame, the same as on the
Responses socket, and ends its request; closing the socket cancels the one that runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from starlette.types import Receive, Scope, Send

from diptych_gateway.admission.admitting import admitted
from diptych_gateway.answering.answers import ChunkWriter
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_gateway.completions.chat import answer_id, writer_for
from diptych_gateway.errors import ApiError
from diptych_gateway.judging.bodies import ChatBody, decode
from diptych_gateway.judging.checking import ChatCall, check
from diptych_gateway.judging.harmless import only, unsupported
from diptych_gateway.responses.writing import error_frame
from diptych_gateway.sockets.connections import Connection, Frame, Lane, SocketRoom

_DATA = b"data: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSocket:
    """An ASGI application of one WebSocket route."""

    room: SocketRoom

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.room.serve(_Connection, scope, receive, send)


class _Connection(Connection[ChatBody]):
    """One client's socket: one lane."""

    async def lane_of(self, text: str) -> Lane:
        return None

    async def decoded(self, text: str) -> ChatBody:
        return await self.room.intake.judged(len(text), partial(_decoded, text))

    async def answer(self, frame: Frame[ChatBody], lane: Lane) -> None:
        generations, came = self.room.generations, self.arrival()
        judge = partial(_judge, frame.body, resume=self.resume)
        call = await self.room.intake.judged(frame.size, judge)
        with admitted(self.room.admission, generations.now_s, call.priority_class):
            async with generations.accepted(call, came, answer_id) as accepted:
                call = replace(call, messages=[], tooling=None)  # nobody needs them any more
                await self.deliver(accepted.stream, _Bare(writer_for(accepted, call)))


class _Bare:
    """The events of a `ChunkWriter` without what server-sent events put around them."""

    def __init__(self, writer: ChunkWriter) -> None:
        self._writer = writer

    def start(self) -> list[bytes]:
        return _bare(self._writer.start())

    def texts(self, pieces: Iterable[Shown]) -> list[bytes]:
        return _bare(self._writer.texts(pieces))

    def last(self, stream: AnswerStream) -> list[bytes]:
        if stream.failure is not None:
            return self.failed(stream.failure)
        return _bare(self._writer.last(stream))

    def failed(self, failure: ApiError) -> list[bytes]:
        return [error_frame(failure)]


def _bare(events: list[bytes]) -> list[bytes]:
    return [event[event.index(_DATA) + len(_DATA) : -2] for event in events]


def _decoded(text: str) -> ChatBody:
    return decode(text.encode())


def _judge(body: ChatBody, *, resume: bool) -> ChatCall:
    if body.stream is False:
        raise unsupported("stream", False, (True,))
    only("n", body.n, (1,))
    return check(msgspec.structs.replace(body, stream=True), resume=resume)

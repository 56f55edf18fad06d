"""`/v1/responses` over HTTP: create, retrieve (whole or as a stream), cancel, delete."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from starlette.types import Receive, Scope, Send

from diptych_contracts.errors import DiptychError, InvalidRequest
from diptych_contracts.journal import EndReason
from diptych_contracts.responses import StoredAnswer, StoredResponse
from diptych_gateway.admission.admitting import admitted
from diptych_gateway.admission.generating import Arrival, arrival, watched
from diptych_gateway.answering.answers import DONE
from diptych_gateway.answering.delivering import (
    EventStream,
    deliver,
    send_error,
    send_json,
    until_over,
)
from diptych_gateway.errors import ApiError, from_error
from diptych_gateway.idempotency.header import Once, once_of
from diptych_gateway.judging.class_checks import likely_class
from diptych_gateway.keeping.records import Records
from diptych_gateway.listening.intake import Intake
from diptych_gateway.listening.reading import ClientGone, flag, wants_resume, with_list
from diptych_gateway.responses.bodies import decode_response
from diptych_gateway.responses.checking import ResponseCall, check_included, check_response
from diptych_gateway.responses.input_pages import listed, page
from diptych_gateway.responses.objects import Deleted, ResponseObject, ended, in_progress, shown
from diptych_gateway.responses.part_events import replayed
from diptych_gateway.responses.turns import Turn, Turns
from diptych_gateway.responses.writing import SseWriter, sse
from diptych_policy.admission import Admission
from diptych_telemetry import logger

CANCELLED = "the client cancelled it"
_CANCEL_S = 5.0
"""How long a cancel waits for the end it asked for."""
_BATCH = 256
"""Replayed events per write."""

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logger(__name__)


class Answering:
    """An ASGI application out of a handler: errors become error objects."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handler(scope, receive, send)
        except ClientGone:
            log.info("client_left_early", request_id=scope["state"]["request_id"])
        except DiptychError as err:
            await send_error(send, from_error(err))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the query of a retrieval asks for."""

    stream: bool
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """The handlers of the Responses API."""

    admission: Admission
    turns: Turns
    records: Records
    intake: Intake

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/responses`."""
        generations = self.turns.generations
        came = arrival(scope, arrived_s=generations.now_s())
        body = await self.intake.read(scope["headers"], receive)
        with admitted(self.admission, generations.now_s, likely_class(body)):
            call, once = await self.intake.judged(len(body), partial(_judge, body, scope))
            del body
            async with self.turns.new(call, came, once=once) as turn:
                call = replace(call, input=())  # while the answer lasts nobody needs it
                await self._answer(turn, call, receive, send)

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/responses/{id}`, with `stream` and `starting_after` as a stream."""
        wanted = query(scope)
        stored = await self._found(scope)
        if not wanted.stream:
            await _send(send, shown(await self.turns.as_it_stands(stored)))
        elif stored.answer is not None:
            await self._replay(stored, stored.answer, wanted, scope=scope, send=send)
        else:
            now_s = self.turns.generations.now_s
            came = arrival(scope, arrived_s=now_s())
            with admitted(self.admission, now_s):
                async with self.turns.again(stored, came, after=wanted.after) as turn:
                    await self._stream(turn, receive, send)

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/responses/{id}/cancel`: what has ended stays as it is."""
        stored = await self.turns.as_it_stands(await self._found(scope))
        if stored.answer is None:
            self.records.cancel(stored, CANCELLED)
            stored = await self._until_ended(stored, scope)
        await _send(send, shown(stored))

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`DELETE /v1/responses/{id}`; one that still runs is cancelled."""
        stored = await self.turns.as_it_stands(await self._found(scope))
        if stored.answer is None:
            self.records.cancel(stored, CANCELLED)
        await self.turns.archive.delete(stored)
        body = msgspec.json.encode(Deleted(id=stored.response_id))
        await send_json(send, 200, body)

    async def input_items(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`GET /v1/responses/{id}/input_items`."""
        wanted = page(scope)
        stored = await self.turns.archive.with_messages(await self._found(scope))
        await send_json(send, 200, msgspec.json.encode(listed(stored, wanted)))

    async def _answer(self, turn: Turn, call: ResponseCall, receive: Receive, send: Send) -> None:
        if call.stream:
            await self._stream(turn, receive, send)
            return
        if call.background:
            await _send(send, in_progress(turn.stored))
            return
        async with watched(turn.stream, receive):
            answer = await self._whole(turn)
        if answer is not None:
            await _send(send, ended(turn.stored, answer))

    async def _stream(self, turn: Turn, receive: Receive, send: Send) -> None:
        async with watched(turn.stream, receive):
            await deliver(
                turn.stream,
                SseWriter(turn),
                EventStream(send),
                at_once=True,
                before_end=partial(self.turns.settle, turn),
            )

    async def _whole(self, turn: Turn) -> StoredAnswer | None:
        """The answer once it is complete; None if the client left.

        Raises:
            ApiError: it failed. A cancelled one is an answer: somebody wanted it so.
        """
        stream = turn.stream
        await until_over(stream)
        if stream.gone:
            return None
        if stream.end is not None:
            await self._settle(turn)
        if stream.failure is not None and not _cancelled(turn):
            raise stream.failure
        return turn.answer()

    async def _settle(self, turn: Turn) -> None:
        while not turn.stream.over:
            for piece in turn.stream.texts():
                turn.delta(piece)
            await asyncio.sleep(0)  # a long answer must not keep the loop to itself
        await self.turns.settle(turn)

    async def _replay(
        self,
        stored: StoredResponse,
        answer: StoredAnswer,
        wanted: Wanted,
        *,
        scope: Scope,
        send: Send,
    ) -> None:
        outlet = EventStream(send)
        slow_reader_s = self.turns.generations.settings.slow_reader_s
        await outlet.begin()
        batch: list[bytes] = []
        try:
            for events in replayed(stored, answer, after=wanted.after):
                batch += sse(events)
                if len(batch) >= _BATCH:
                    async with asyncio.timeout(slow_reader_s):
                        await outlet.write(batch, last=False)
                    batch = []
                    await asyncio.sleep(0)
            async with asyncio.timeout(slow_reader_s):
                await outlet.write([*batch, DONE], last=True)
        except TimeoutError:
            if abort := scope["state"].get("abort"):
                abort()

    async def _until_ended(self, stored: StoredResponse, scope: Scope) -> StoredResponse:
        """`stored` with the end that was asked for, if it comes in time."""
        generations = self.turns.generations
        state = scope["state"]
        came = Arrival(state["request_id"], generations.now_s(), caller=state["caller"])
        try:
            async with asyncio.timeout(_CANCEL_S), self.turns.again(stored, came) as turn:
                await until_over(turn.stream)
                if turn.stream.end is None:
                    return stored
                await self._settle(turn)
                return msgspec.structs.replace(stored, answer=turn.answer())
        except TimeoutError:
            return stored

    async def _found(self, scope: Scope) -> StoredResponse:
        wanted: str = scope["path_params"]["response_id"]
        stored = await self.turns.archive.get(wanted, tenant=scope["state"]["tenant"])
        if stored is None:
            text = f"there is no response '{wanted[:80]}' (any more)"
            raise ApiError(404, text, code="response_not_found", param="response_id")
        return stored


def _judge(body: bytes, scope: Scope) -> tuple[ResponseCall, Once | None]:
    call = check_response(decode_response(body), resume=wants_resume(scope["headers"]))
    return call, once_of(scope, body)


def query(scope: Scope) -> Wanted:
    """What a retrieval's query and `Last-Event-ID` ask for.

    Raises:
        InvalidRequest: names the parameter.
    """
    given, include = with_list(scope, "include")
    check_included(include)
    stream = flag(given.pop("stream", "false"), "stream")
    flag(given.pop("include_obfuscation", "false"), "include_obfuscation")
    last_seen = dict(scope["headers"]).get(b"last-event-id", b"").decode("latin-1")
    after = given.pop("starting_after", last_seen)
    if given:
        name = next(iter(given))[:80]
        raise InvalidRequest(f"unknown parameter '{name}'", param=name, code="unknown_parameter")
    if after and not (after.isascii() and after.isdecimal() and len(after) < 10):
        text = f"'starting_after': expected the number of an event, saw {after[:40]!r}"
        raise InvalidRequest(text, param="starting_after")
    if after and not stream:
        text = "'starting_after' is only allowed together with 'stream=true'"
        raise InvalidRequest(text, param="starting_after")
    return Wanted(stream, int(after) if after else -1)


def _cancelled(turn: Turn) -> bool:
    end = turn.stream.end
    return end is not None and end.reason is EndReason.CANCELLED


async def _send(send: Send, response: ResponseObject) -> None:
    await send_json(send, 200, msgspec.json.encode(response))

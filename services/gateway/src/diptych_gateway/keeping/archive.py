"""Bucket `responses`: what any gateway can say of a response later.

A response is stored before its request is, so nothing runs that could not be found. When it has
ended its text is written into it, once, whoever is first: the gateway that took it, or the one
that reads it now. Writes wait in order while the bus is away; beyond `MAX_WAITING` the oldest is
dropped, and the next who asks for that response reads its text from the journal.

What makes a response larger than `MAX_RESPONSE_BYTES` is kept by reference (`large_parts`): the
messages of a long turn, the text of a long answer. A conversation is a chain: no turn repeats what
the ones before it hold.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from diptych_bus.port import Bus
from diptych_contracts.errors import Conflict, Permanent
from diptych_contracts.ids import RequestId
from diptych_contracts.responses import (
    PREFIX,
    PartRef,
    StoredAnswer,
    StoredResponse,
    StoredText,
    StoredTurn,
    response_id,
)
from diptych_contracts.streams import (
    ENDED_RESPONSE_TTL_S,
    MAX_RESPONSE_BYTES,
    RESPONSES,
    RUNNING_RESPONSE_TTL_S,
)
from diptych_contracts.wire import encode
from diptych_gateway.errors import ApiError
from diptych_gateway.keeping.large_parts import ResponseParts, parts_of
from diptych_gateway.keeping.write_behind import MAX_WAITING, WriteBehind
from diptych_telemetry import logger
from diptych_text.answer import AnswerText

_ID = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")

Make = Callable[[], StoredAnswer]
Ending = tuple[Make, asyncio.Event]
"""What makes the text of a response that has ended, and who waits until it is written."""

log = logger(__name__)


def deltas(text: AnswerText, token_ids: Iterable[int]) -> Iterator[str]:
    """The pieces a whole answer is shown in: what a stream of it says, token by token."""
    for token_id in token_ids:
        if piece := text.push((token_id,)):
            yield piece
    if rest := text.finish():
        yield rest


def _text_name(stored: StoredResponse) -> str:
    return f"{stored.response_id}.text"


class Archive:
    """Stored responses."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = bus.bucket(RESPONSES, StoredResponse)
        self._parts = ResponseParts(bus)
        self._writes: WriteBehind[RequestId, Ending] = WriteBehind(self._written, self._drop)

    async def create(self, stored: StoredResponse) -> StoredResponse:
        """Store a response that is about to run; gives it as it is kept.

        Raises:
            ApiError: it is too large, its messages apart (413).
            Transient: the bus is away.
        """
        if len(encode(stored)) > MAX_RESPONSE_BYTES:
            stored = await self._without_turn(stored)
        ttl_s = RUNNING_RESPONSE_TTL_S if stored.answer is None else ENDED_RESPONSE_TTL_S
        try:
            await self._bucket.create(stored.response_id, stored, ttl_s=ttl_s)
        except BaseException:
            await self._parts.drop(stored.turn)
            raise
        return stored

    async def get(self, wanted: str, *, tenant: str) -> StoredResponse | None:
        """The response of that id, its messages perhaps apart; None if there is none (any more).

        One of another tenant is none.

        Raises:
            ApiError: a part of it is gone (410).
        """
        if not _ID.fullmatch(wanted):
            return None
        kept = await self._bucket.get(wanted)
        if kept is None or kept.value.tenant != tenant:
            return None
        stored, answer = kept.value, kept.value.answer
        if answer is None or answer.text is None:
            return stored
        text: StoredText = await self._parts.get(answer.text, StoredText)
        whole = msgspec.structs.replace(answer, deltas=text.deltas, logprobs=text.logprobs)
        return msgspec.structs.replace(stored, answer=whole)

    async def with_messages(self, stored: StoredResponse) -> StoredResponse:
        """`stored` with its messages. Raises what `get` raises."""
        if stored.turn is None:
            return stored
        turn: StoredTurn = await self._parts.get(stored.turn, StoredTurn)
        return msgspec.structs.replace(stored, input=turn.input, history=turn.history)

    async def delete(self, stored: StoredResponse) -> None:
        """Forget a response, all of it."""
        await self._bucket.delete(stored.response_id)
        await self._parts.delete(*parts_of(stored))
        if stored.answer is None:  # which may have been written since
            await self._parts.delete(PartRef(name=_text_name(stored), n_bytes=0))

    async def _without_turn(self, stored: StoredResponse) -> StoredResponse:
        turn = StoredTurn(input=stored.input, history=stored.history)
        name = f"{stored.response_id}.turn"
        ref = PartRef(name=name, n_bytes=0)
        kept = msgspec.structs.replace(stored, input=(), history=None, turn=ref)
        size = len(encode(kept))
        if size > MAX_RESPONSE_BYTES:
            raise ApiError(
                413,
                f"expected at most {MAX_RESPONSE_BYTES} bytes of instructions and metadata "
                f"in a response that is stored, saw {size}: 'store': false has no such limit",
                code="response_too_large",
                param="instructions",
            )
        return msgspec.structs.replace(kept, turn=await self._parts.put(name, turn))

    def finish_soon(self, request_id: RequestId, make: Make) -> asyncio.Event:
        """Have what `make` gives written into a response that has ended, if it is still stored.

        Gives an event that is set when that is done.
        """
        waiting = self._writes.get(request_id)
        if waiting is None:
            waiting = (make, asyncio.Event())
            self._writes.put(request_id, waiting)
        return waiting[1]

    async def finish(self, request_id: RequestId, make: Make, *, timeout_s: float) -> bool:
        """The same, waiting for it; False if `timeout_s` ran out (it is written later)."""
        done = self.finish_soon(request_id, make)
        try:
            async with asyncio.timeout(timeout_s):
                await done.wait()
        except TimeoutError:
            return False
        return True

    async def settled(self, timeout_s: float) -> bool:
        """Wait until everything is written; False if `timeout_s` ran out."""
        return await self._writes.settled(timeout_s)

    async def run(self) -> None:
        """Write until cancelled."""
        await self._writes.run()

    def _drop(self, request_id: RequestId, ending: Ending) -> None:
        log.warning("response_not_archived", request_id=request_id, waiting=MAX_WAITING)
        ending[1].set()

    async def _written(self, request_id: RequestId, ending: Ending) -> None:
        make, done = ending
        try:
            await self._write(response_id(request_id), make)
        except Permanent as err:
            log.error("response_not_archived", request_id=request_id, error=str(err))
        done.set()

    async def _write(self, key: str, make: Make) -> None:
        text: PartRef | None = None
        while True:
            kept = await self._bucket.get(key)
            if kept is None:
                await self._parts.drop(text)  # it was deleted meanwhile
                return
            if kept.value.answer is not None:
                return
            ended = msgspec.structs.replace(kept.value, answer=make())
            if len(encode(ended)) > MAX_RESPONSE_BYTES:
                ended, text = await self._without_text(ended)
            try:
                await self._bucket.update(key, ended, kept.revision, ttl_s=ENDED_RESPONSE_TTL_S)
            except Conflict:
                continue
            return

    async def _without_text(self, ended: StoredResponse) -> tuple[StoredResponse, PartRef]:
        """`ended` with its text kept apart; whoever else does the same writes the same."""
        answer = ended.answer
        assert answer is not None
        text = StoredText(deltas=answer.deltas, logprobs=answer.logprobs)
        ref = await self._parts.put(_text_name(ended), text)
        slim = msgspec.structs.replace(answer, deltas=(), logprobs=(), text=ref)
        return msgspec.structs.replace(ended, answer=slim), ref

"""Bucket `responses`: what any gateway can say of a response later.

A response is stored before its request is, so nothing runs that could not be found. When it has
ended its text is written into it, once, whoever is first: the gateway that took it, or the one
that reads it now. Writes wait in order while the bus is away; beyond `MAX_WAITING` the oldest is
dropped, and the next who asks for that response reads its text from the journal.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from diptych_bus.port import Bus
from diptych_contracts.errors import Conflict, Permanent, Transient
from diptych_contracts.ids import RequestId
from diptych_contracts.responses import PREFIX, StoredAnswer, StoredResponse, response_id
from diptych_contracts.streams import (
    ENDED_RESPONSE_TTL_S,
    MAX_RESPONSE_BYTES,
    RESPONSES,
    RUNNING_RESPONSE_TTL_S,
)
from diptych_contracts.wire import encode
from diptych_gateway.errors import ApiError
from diptych_telemetry import logger
from diptych_text.answer import AnswerText

MAX_WAITING = 4096
_STEP_TIMEOUT_S = 3.0
_PAUSE_S = 0.25
_ID = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")

Make = Callable[[], StoredAnswer]

log = logger(__name__)


def deltas(text: AnswerText, token_ids: Iterable[int]) -> Iterator[str]:
    """The pieces a whole answer is shown in: what a stream of it says, token by token."""
    for token_id in token_ids:
        if piece := text.push((token_id,)):
            yield piece
    if rest := text.finish():
        yield rest


class Archive:
    """Stored responses."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = bus.bucket(RESPONSES, StoredResponse)
        self._waiting: dict[RequestId, tuple[Make, asyncio.Event]] = {}
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def create(self, stored: StoredResponse) -> None:
        """Store a response that is about to run.

        Raises:
            ApiError: it is too large (413).
            Transient: the bus is away.
        """
        size = len(encode(stored))
        if size > MAX_RESPONSE_BYTES:
            raise ApiError(
                413,
                f"expected at most {MAX_RESPONSE_BYTES} bytes of input, instructions and metadata "
                f"in a response that is stored, saw {size}: 'store': false has no such limit",
                code="response_too_large",
                param="input",
            )
        ttl_s = RUNNING_RESPONSE_TTL_S if stored.answer is None else ENDED_RESPONSE_TTL_S
        await self._bucket.create(stored.response_id, stored, ttl_s=ttl_s)

    async def get(self, wanted: str) -> StoredResponse | None:
        """The response of that id; None if there is none (any more)."""
        if not _ID.fullmatch(wanted):
            return None
        kept = await self._bucket.get(wanted)
        return None if kept is None else kept.value

    async def delete(self, stored: StoredResponse) -> None:
        """Forget a response."""
        await self._bucket.delete(stored.response_id)

    def finish_soon(self, request_id: RequestId, make: Make) -> asyncio.Event:
        """Have what `make` gives written into a response that has ended, if it is still stored.

        Gives an event that is set when that is done.
        """
        while len(self._waiting) >= MAX_WAITING:
            oldest = next(iter(self._waiting))
            self._waiting.pop(oldest)[1].set()
            log.warning("response_not_archived", request_id=oldest, waiting=MAX_WAITING)
        _, done = self._waiting.setdefault(request_id, (make, asyncio.Event()))
        self._idle.clear()
        self._news.set()
        return done

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
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._next()
            self._idle.set()

    async def _next(self) -> None:
        request_id, (make, done) = next(iter(self._waiting.items()))
        try:
            async with asyncio.timeout(_STEP_TIMEOUT_S):
                await self._write(response_id(request_id), make)
        except (Transient, TimeoutError):
            await asyncio.sleep(_PAUSE_S)
            return
        except Permanent as err:
            log.error("response_not_archived", request_id=request_id, error=str(err))
        self._waiting.pop(request_id, None)
        done.set()

    async def _write(self, key: str, make: Make) -> None:
        while True:
            kept = await self._bucket.get(key)
            if kept is None or kept.value.answer is not None:
                return
            ended = msgspec.structs.replace(kept.value, answer=make())
            try:
                await self._bucket.update(key, ended, kept.revision, ttl_s=ENDED_RESPONSE_TTL_S)
            except Conflict:
                continue
            return

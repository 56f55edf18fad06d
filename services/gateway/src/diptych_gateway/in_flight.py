"""The answers under way, by request id: one journal follower and one ticker serve them all."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diptych_bus.port import JournalItem
from diptych_contracts.ids import RequestId
from diptych_gateway.errors import ApiError
from diptych_gateway.patience import Due
from diptych_gateway.records import Records
from diptych_gateway.streams import AnswerStream
from diptych_policy.journal import parts

EXPIRED = "nothing was heard of the request in time"


class InFlight:
    """Every `AnswerStream` of this gateway.

    Args:
        now_s: The monotonic clock.
        records: Where it is written that a request is given up.
    """

    def __init__(self, now_s: Callable[[], float], records: Records) -> None:
        self._now_s = now_s
        self._records = records
        self._streams: dict[RequestId, AnswerStream] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[AnswerStream]:
        return iter(list(self._streams.values()))

    @contextmanager
    def holding(self, stream: AnswerStream) -> Iterator[None]:
        """Hear the journal for `stream` inside the `with`; afterwards it is ignored.

        Left without an end, the request is cancelled, however that came about.
        """
        request = stream.request
        self._streams[request.request_id] = stream
        self._empty.clear()
        try:
            yield
        finally:
            del self._streams[request.request_id]
            if not self._streams:
                self._empty.set()
            if stream.end is None:
                reason = "the client left" if stream.gone else "the gateway gave up"
                self._records.cancel(request, reason)

    def dispatch(self, item: JournalItem) -> None:
        """Hand the parts of a journal entry to the answers they are about."""
        now_s = self._now_s()
        for part in parts(item.entry):
            stream = self._streams.get(part.request_id)
            if stream is not None:
                stream.feed(part, now_s=now_s)

    def tick(self, elapsed_s: float, *, connected: bool) -> None:
        """Move every answer's timers on, and do what is due."""
        for stream in self:
            match stream.patience.tick(elapsed_s, connected=connected):
                case Due.KEEP_ALIVE:
                    stream.keep_alive()
                case Due.DISCONNECT:
                    stream.disconnect()
                case Due.EXPIRE:
                    self._records.expire(stream.request, EXPIRED)
                case Due.GIVE_UP:
                    stream.fail(ApiError(504, EXPIRED, code="expired"))
                case Due.NOTHING:
                    pass

    def fail_all(self, why: str) -> None:
        """End every answer here."""
        for stream in self:
            stream.fail(ApiError(503, why, code="draining", retry_after_s=1.0))

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until there are none; False if `timeout_s` ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

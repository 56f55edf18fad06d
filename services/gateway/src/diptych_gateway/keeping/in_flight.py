"""The answers being read here, by request id: one ticker and the journals' followers serve all."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diptych_bus.port import JournalItem
from diptych_contracts.ids import RequestId
from diptych_gateway.answering.patience import Due
from diptych_gateway.answering.streams import AnswerStream
from diptych_gateway.errors import ApiError
from diptych_gateway.keeping.keeper import Keeper
from diptych_gateway.keeping.records import Records
from diptych_policy.journal import parts

EXPIRED = "nothing was heard of the request in time"


class InFlight:
    """Every `AnswerStream` of this gateway.

    Args:
        now_s: The monotonic clock.
        records: Where it is written that a request is given up.
        keeper: Of answers that outlive their client's connection.
    """

    def __init__(self, now_s: Callable[[], float], records: Records, keeper: Keeper) -> None:
        self._now_s = now_s
        self._records = records
        self.keeper = keeper
        self._streams: dict[RequestId, list[AnswerStream]] = {}
        self.journal_seq = 0
        """How far the journals were heard: no token of a request that comes now stands before."""
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def __iter__(self) -> Iterator[AnswerStream]:
        return iter([stream for streams in self._streams.values() for stream in streams])

    @contextmanager
    def holding(self, stream: AnswerStream) -> Iterator[None]:
        """Hear the journal for the first reader of a request that came in here.

        Left without an end, the request is cancelled, however that came about, unless the keeper
        has it: then its client may come back.
        """
        try:
            with self.reading(stream):
                yield
        finally:
            kept = stream.request.request_id in self.keeper
            if stream.end is None and not stream.refused and not kept:
                reason = "the client left" if stream.gone else "the gateway gave up"
                self._records.cancel(stream.request, reason)

    @contextmanager
    def reading(self, stream: AnswerStream) -> Iterator[None]:
        """Hear the journal for `stream` inside the `with`; afterwards it is ignored."""
        request_id = stream.request.request_id
        self._streams.setdefault(request_id, []).append(stream)
        self._empty.clear()
        try:
            yield
        finally:
            streams = self._streams[request_id]
            streams.remove(stream)
            if not streams:
                del self._streams[request_id]
            if not self._streams:
                self._empty.set()

    def dispatch(self, item: JournalItem) -> None:
        """Hand the parts of a journal entry, this gateway's or another's, to their answers."""
        now_s = self._now_s()
        self.journal_seq = max(self.journal_seq, item.seq)
        for part in parts(item.entry):
            for stream in self._streams.get(part.request_id, ()):
                stream.hear(item.seq, part, now_s=now_s)
            self.keeper.feed(part)

    def tick(self, elapsed_s: float, *, connected: bool) -> None:
        """Move every answer's timers on, and do what is due."""
        self.keeper.tick(elapsed_s, connected=connected)
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

    def fail_all(self, why: str, *, code: str = "draining") -> None:
        """End every answer here."""
        for stream in self:
            stream.fail(ApiError(503, why, code=code, retry_after_s=1.0))

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until there are none; False if `timeout_s` ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

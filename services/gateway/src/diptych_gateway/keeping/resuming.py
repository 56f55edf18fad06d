"""Answers read again, here or at another gateway than their own: the journal is enough.

A reader first hears the journal live (held back), then reads it from the response's start, then
goes on live. While it reads, whoever answers for the request is told, again and again: its gateway,
or the scheduler if that one is dead, would otherwise cancel what nobody seems to read.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from diptych_bus.port import Bus, Delivery, Subscription
from diptych_contracts import subjects
from diptych_contracts.errors import Transient
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.responses import Attended, StoredResponse
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_gateway.answering.streams import AnswerStream
from diptych_gateway.errors import ApiError
from diptych_gateway.keeping.in_flight import InFlight
from diptych_gateway.keeping.keeper import Keeper
from diptych_policy.journal import JournalPart, RequestView, parts
from diptych_telemetry import logger

ATTEND_S = 5.0
"""How often is said what is read: a fraction of the grace that it renews."""
_BREATH = 256
"""Journal entries between two looks at the rest of the event loop."""

log = logger(__name__)


class Resumable(Protocol):
    """Where an answer's tokens stand: a stored response, or a chat answer's record."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def gateway(self) -> Incarnation: ...

    @property
    def journal_seq(self) -> int: ...

    @property
    def answer_id(self) -> str:
        """What its client calls it."""
        ...


@dataclass(slots=True)
class _Followed:
    subscription: Subscription
    readers: int = 0


class Resumption:
    """Reads journals for answers whose requests came in elsewhere, or earlier.

    Args:
        bus: Where they are.
        gateway: This one.
        in_flight: Hears them.
        keeper: Of this gateway's own answers.
        now_s: The monotonic clock.
    """

    def __init__(
        self,
        bus: Bus,
        gateway: Incarnation,
        *,
        in_flight: InFlight,
        keeper: Keeper,
        now_s: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._in_flight = in_flight
        self._keeper = keeper
        self._now_s = now_s
        self._followed: dict[Incarnation, _Followed] = {}
        self._attended: dict[Incarnation, Counter[RequestId]] = {}
        self._lock = asyncio.Lock()
        self._listening: Subscription | None = None

    async def start(self) -> None:
        """Hear which of this gateway's answers are read elsewhere."""
        subject = subjects.attended(self._gateway)
        self._listening = await self._bus.subscribe(subject, self._on_attended)

    async def close(self) -> None:
        """Hear no more."""
        if self._listening is not None:
            await self._listening.close()

    async def run(self) -> None:
        """Say what is read here until cancelled."""
        while True:
            await asyncio.sleep(ATTEND_S)
            for gateway, readers in list(self._attended.items()):
                await self._tell(gateway, tuple(readers))

    @asynccontextmanager
    async def reading(self, stream: AnswerStream, stored: Resumable) -> AsyncIterator[None]:
        """Hear all of an answer inside the `async with`: what was said, and what follows.

        Raises:
            ApiError: the journal does not hold it any more (410).
            Transient: the bus is away.
        """
        with self._in_flight.reading(stream):
            stream.hold_back()
            async with self._following(stored.gateway), self._attending(stored):
                await self._catch_up(stream, stored)
                yield

    async def end_of(self, stored: StoredResponse) -> RequestView | None:
        """The journal of a response that has ended and is not archived; None if it still runs.

        Raises:
            ApiError: the journal does not hold it any more (410).
        """
        record = await self._record(stored)
        if record is not None and record.state is not RecordState.CLOSED:
            return None
        told = stored.sampling.top_logprobs is not None
        view = RequestView(stored.request_id, secret=stored.secret, logprobs=[] if told else None)
        async for _, part in self._history(stored, record):
            view.apply(part)
        await self._check_whole(stored, record, ended=view.end is not None)
        return view if view.end is not None else None

    async def _catch_up(self, stream: AnswerStream, stored: Resumable) -> None:
        record = await self._record(stored)
        seq = stored.journal_seq
        async for seq, part in self._history(stored, record):  # noqa: B007 - the last one counts
            stream.feed(part, now_s=self._now_s())
        await self._check_whole(stored, record, ended=stream.end is not None)
        stream.caught_up(seq, now_s=self._now_s())

    async def _check_whole(
        self, stored: Resumable, record: RequestRecord | None, *, ended: bool
    ) -> None:
        """Raise 410 if what was read cannot be all of it: its beginning has aged.

        Only a record knows exactly where its request began. Without one (not yet created, or
        expired) the gateway's own, earlier mark must do: then an end proves that all was there.
        """
        whole = (await self._bus.span()).covers(_start_seq(stored, record))
        closed = record is not None and record.state is RecordState.CLOSED
        if (not whole and (record is not None or not ended)) or (closed and not ended):
            raise gone(stored)

    async def _history(
        self, stored: Resumable, record: RequestRecord | None
    ) -> AsyncIterator[tuple[int, JournalPart]]:
        """What the journal says of an answer so far, with its sequences."""
        entries = self._bus.read(
            stored.gateway,
            after_seq=_start_seq(stored, record),
            until_seq=_end_seq(record),
        )
        count = 0
        async for item in entries:
            for part in parts(item.entry):
                if part.request_id == stored.request_id:
                    yield item.seq, part
            count += 1
            if count % _BREATH == 0:
                await asyncio.sleep(0)

    async def _record(self, stored: Resumable) -> RequestRecord | None:
        bucket = self._bus.bucket(REQUEST_RECORDS, RequestRecord)
        kept = await bucket.get(stored.request_id)
        return None if kept is None else kept.value

    @asynccontextmanager
    async def _following(self, gateway: Incarnation) -> AsyncIterator[None]:
        if gateway == self._gateway:  # followed anyhow
            yield
            return
        async with self._lock:
            followed = self._followed.get(gateway)
            if followed is None:
                subscription = await self._bus.follow(gateway, self._in_flight.dispatch)
                followed = self._followed[gateway] = _Followed(subscription)
            followed.readers += 1
        try:
            yield
        finally:
            followed.readers -= 1
            if not followed.readers and self._followed.get(gateway) is followed:
                del self._followed[gateway]
                await followed.subscription.close()

    @asynccontextmanager
    async def _attending(self, stored: Resumable) -> AsyncIterator[None]:
        gateway, request_id = stored.gateway, stored.request_id
        if gateway == self._gateway:
            with self._keeper.reading(request_id):
                yield
            return
        readers = self._attended.setdefault(gateway, Counter())
        readers[request_id] += 1
        try:
            await self._tell(gateway, (request_id,))
            yield
        finally:
            readers[request_id] -= 1
            if not readers[request_id]:
                del readers[request_id]
            if not readers:
                self._attended.pop(gateway, None)

    async def _tell(self, gateway: Incarnation, request_ids: tuple[RequestId, ...]) -> None:
        message = Attended(reader=self._gateway, request_ids=request_ids)
        try:
            await self._bus.publish(subjects.attended(gateway), message)
        except Transient as err:
            log.debug("attendance_not_told", gateway=gateway, error=str(err))

    def _on_attended(self, delivery: Delivery) -> None:
        attended: Attended = delivery.decode(Attended)
        self._keeper.read_elsewhere(attended.request_ids)


def _start_seq(stored: Resumable, record: RequestRecord | None) -> int:
    """The sequence after which the journal tells of an answer."""
    return max(stored.journal_seq, record.journal_seq if record is not None else 0)


def _end_seq(record: RequestRecord | None) -> int | None:
    """Where the journal holds the end, if that is known."""
    return (record.journal_end_seq or None) if record is not None else None


def gone(stored: Resumable) -> ApiError:
    """What a client is told whose answer nobody holds any more."""
    return ApiError(
        410,
        f"the text of '{stored.answer_id}' is no longer there: the resume window has passed",
        code="response_expired",
    )

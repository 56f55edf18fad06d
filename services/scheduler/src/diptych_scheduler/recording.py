"""Writing the records of requests, by compare-and-swap, and knowing who wrote what stands there."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from opentelemetry.context import Context

from diptych_bus.port import Bus, Delivery, Kept, Pulled
from diptych_contracts.errors import Conflict, Permanent, StoreFull, Transient
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS, REQUESTS
from diptych_policy.lifecycle import (
    AdoptionLost,
    AdoptRecord,
    Event,
    RecordAdopted,
    RecordCreated,
    RecordGone,
    RecordSeen,
)
from diptych_policy.merging import overrules, surplus, taken_on, unowned
from diptych_scheduler.journals import Journals
from diptych_scheduler.outlasting import PAUSE_S, until_back
from diptych_telemetry import logger

log = logger("scheduler")

Seen = Kept[RequestRecord] | None
"""What stands there if a swap was lost to another."""


class Teller(Protocol):
    """Who writes, and hears what came of it."""

    @property
    def me(self) -> Incarnation: ...

    def tell(self, event: Event) -> None: ...


class Records:
    """Bucket `requests`, as far as this scheduler writes it.

    Args:
        owner: Told of created, adopted and lost records.
        bus: Where the bucket is.
        journals: Read when a record is adopted.
        resume_window_s: How long a closed record stays.
    """

    def __init__(
        self, owner: Teller, bus: Bus, journals: Journals, *, resume_window_s: float
    ) -> None:
        self._owner = owner
        self._bus = bus
        self._journals = journals
        self._resume_window_s = resume_window_s
        self._bucket = bus.bucket(REQUEST_RECORDS, RequestRecord)
        self._revisions: dict[RequestId, int] = {}
        self._expected: dict[RequestId, Pulled] = {}
        self._contexts: dict[RequestId, Context | None] = {}
        self.full = False
        """Whether the bucket takes none."""

    def __len__(self) -> int:
        """How many things are remembered of requests."""
        return len(self._revisions) + len(self._expected) + len(self._contexts)

    def expect(self, request_id: RequestId, pulled: Pulled) -> None:
        """`pulled` is acknowledged once the request's record exists."""
        self._expected[request_id] = pulled
        self._contexts[request_id] = pulled.delivery.context

    def expected(self) -> list[Pulled]:
        """Messages whose record does not exist yet."""
        return list(self._expected.values())

    def context(self, request_id: RequestId) -> Context | None:
        """The trace that a request came with."""
        return self._contexts.get(request_id)

    def is_news(self, kept: Kept[RequestRecord]) -> bool:
        """Whether a watched record was written by someone else (or before this life).

        The revision of another's record is not taken over: what is still to be written here was
        decided before that one was known, and must lose its swap.
        """
        request_id = kept.value.request_id
        news = kept.revision > self._revisions.get(request_id, 0)
        if news and kept.value.owner == self._owner.me:
            self._revisions[request_id] = kept.revision
        elif news:
            self._revisions.pop(request_id, None)
        self.settled(kept.value)
        return news

    def gone(self, request_id: RequestId) -> None:
        """A record was deleted or has expired."""
        self._revisions.pop(request_id, None)
        self._contexts.pop(request_id, None)

    def settled(self, record: RequestRecord) -> None:
        """Remember nothing of a closed request; the watch may have told of it before."""
        if record.state is RecordState.CLOSED:
            self.gone(record.request_id)

    async def create(self, record: RequestRecord) -> Seen:
        """Write a record that must not exist, and acknowledge its request.

        A gateway's mark is taken over first: nobody adopts one, so nobody would erase the request.
        A request that nobody reads is erased.
        """
        request_id = record.request_id
        told: Event = RecordCreated(request_id)
        seen = await self._swap(record, lambda: self._bucket.create(request_id, record))
        while seen is not None and unowned(seen.value):
            taken = taken_on(record, seen.value)
            seen = await self._update(taken, seen.revision)
            if taken is not record:
                told = RecordSeen(taken, self._revisions.get(request_id, 0))
        if seen is not None and surplus(record.request_seq, seen.value):
            await until_back(lambda: self._bus.erase(REQUESTS.name, record.request_seq))
        pulled = self._expected.pop(request_id, None)
        if pulled is not None:
            await until_back(pulled.ack)
        if seen is None:
            self._owner.tell(told)
        return seen

    async def save(self, record: RequestRecord) -> Seen:
        """Write over what was last known here; an end also over a gateway's mark."""
        while True:
            revision = self._revisions.get(record.request_id, 0)
            seen = await self._update(record, revision)
            if seen is None or not overrules(record, seen.value):
                break
        self.settled(seen.value if seen else record)
        return seen

    async def adopt(self, effect: AdoptRecord) -> None:
        """Take a dead owner's record over, and read what its journal holds."""
        record = effect.record
        seen = await self._update(record, effect.revision)
        if seen is not None:
            self.settled(seen.value)
            self._owner.tell(AdoptionLost(seen.value, seen.revision))
            return
        if record.request_id not in self._revisions:  # nothing to be had stands there any more
            self._owner.tell(RecordGone(record.request_id))
            return
        log.info("request_adopted", request_id=record.request_id, attempt=record.attempt)
        stored = await until_back(lambda: self._bus.stored(REQUESTS.name, record.request_seq))
        request = _request_in(stored)
        self._contexts[record.request_id] = stored.context if stored else None
        told = await until_back(lambda: self._journals.history(record))
        self._owner.tell(RecordAdopted(record, request, told.parts, told.until_seq, told.whole))

    async def _update(self, record: RequestRecord, revision: int) -> Seen:
        closed = record.state is RecordState.CLOSED
        ttl_s = self._resume_window_s if closed else None
        return await self._swap(
            record,
            lambda: self._bucket.update(record.request_id, record, revision, ttl_s=ttl_s),
        )

    async def _swap(self, record: RequestRecord, write: Callable[[], Awaitable[int]]) -> Seen:
        request_id = record.request_id
        try:
            revision = await self._until_written(write)
        except Conflict:
            kept = await self._standing(request_id)
            if kept is None:
                return None
            self._revisions[request_id] = kept.revision
            return None if kept.value == record else kept
        self._revisions[request_id] = max(revision, self._revisions.get(request_id, 0))
        return None

    async def _standing(self, request_id: RequestId) -> Seen:
        """What stands there; what nobody can read is nobody's mark: the request just goes on."""
        try:
            return await until_back(lambda: self._bucket.get(request_id))
        except Permanent as err:
            log.error("record_unreadable", request_id=request_id, error=str(err))
            return None

    async def _until_written(self, write: Callable[[], Awaitable[int]]) -> int:
        while True:
            try:
                revision = await write()
            except Transient as err:
                self.full = isinstance(err, StoreFull)
                await asyncio.sleep(PAUSE_S)
            else:
                self.full = False
                return revision


def _request_in(stored: Delivery | None) -> Request | None:
    """What stream `REQUESTS` holds, if it is a request."""
    try:
        request: Request | None = stored.decode(Request) if stored else None
    except Permanent as err:
        log.error("request_unreadable", error=str(err))
        return None
    return request

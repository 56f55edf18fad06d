"""What a gateway may write into a request's record: `cancelling` and `ending`, by compare-and-swap.

When many clients leave at once their marks are made side by side: one after the other, the last of
2,000 waited 2.3 s (two round trips each). While the bus is away they wait and are made when it is
back, so a client that left during an outage still frees its workers. Beyond `MAX_WAITING` the
oldest is dropped: that request then ends by its own deadline.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from diptych_bus.port import Bus
from diptych_contracts.errors import Conflict, Permanent, Transient
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS, REQUESTS
from diptych_policy.journal import spoken
from diptych_telemetry import logger

MAX_WAITING = 4096
_SIDE_BY_SIDE = 32
"""Marks under way at once."""
_STEP_TIMEOUT_S = 3.0
_PAUSE_S = 0.25
_SETTLED = (RecordState.CANCELLING, RecordState.ENDING, RecordState.CLOSED)

log = logger(__name__)


class Marked(Protocol):
    """What a mark needs of its request; a stored response will do."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def gateway(self) -> Incarnation: ...

    @property
    def deadline_unix_ms(self) -> int: ...

    @property
    def tenant(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Wish:
    request: Marked
    reason: str
    state: RecordState


class Records:
    """What writes this gateway's marks, one at a time for each request."""

    def __init__(self, bus: Bus, gateway: Incarnation) -> None:
        self._bus = bus
        self._gateway = gateway
        self._bucket = bus.bucket(REQUEST_RECORDS, RequestRecord)
        self._waiting: dict[RequestId, _Wish] = {}
        self._due: deque[_Wish] = deque()
        """Of these, those that nobody is making at the moment."""
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def cancel(self, request: Marked, reason: str) -> None:
        """Have the request cancelled, whether or not its owner knows it yet."""
        self._wish(_Wish(request, reason, RecordState.CANCELLING))

    def expire(self, request: Marked, reason: str) -> None:
        """End the request as expired."""
        self._wish(_Wish(request, reason, RecordState.ENDING))

    async def withdraw(self, request: Marked, reason: str) -> None:
        """Have a request that no scheduler has taken never run; one that has a record keeps it.

        Raises:
            Transient: the bus is away.
        """
        fresh = self._fresh(_Wish(request, reason, RecordState.CANCELLING))
        with suppress(Conflict):
            await self._bucket.create(request.request_id, fresh, ttl_s=REQUESTS.max_age_s)
            log.warning("request_withdrawn", request_id=request.request_id, reason=reason)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until every mark is made; False if `timeout_s` ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Make marks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_SIDE_BY_SIDE):
                tasks.create_task(self._make_marks())

    async def _make_marks(self) -> None:
        while True:
            while not self._due:
                self._news.clear()
                await self._news.wait()
            wish = self._due.popleft()
            if await self._made(wish):
                self._over(wish)
            else:
                await asyncio.sleep(_PAUSE_S)
                self._due.append(wish)

    def _over(self, wish: _Wish) -> None:
        if self._waiting.get(wish.request.request_id) is wish:
            del self._waiting[wish.request.request_id]
        if not self._waiting:
            self._idle.set()

    def _wish(self, wish: _Wish) -> None:
        while len(self._waiting) >= MAX_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            log.warning("cancel_dropped", request_id=oldest, waiting=MAX_WAITING)
        if self._waiting.setdefault(wish.request.request_id, wish) is not wish:
            return
        self._due.append(wish)
        self._idle.clear()
        self._news.set()

    async def _made(self, wish: _Wish) -> bool:
        """Make a mark; False if it is to be tried again."""
        request_id = wish.request.request_id
        if self._waiting.get(request_id) is not wish:
            return True  # dropped
        make = self._end if wish.state is RecordState.ENDING else self._mark
        try:
            async with asyncio.timeout(_STEP_TIMEOUT_S):
                await make(wish)
        except (Transient, TimeoutError):
            return False
        except Permanent as err:
            log.error("mark_impossible", request_id=request_id, error=str(err))
        return True

    async def _mark(self, wish: _Wish) -> None:
        await self._swap(wish, self._cancelling)

    async def _end(self, wish: _Wish) -> None:
        record = await self._swap(wish, self._ending)
        if record is not None and record.end is not None and record.state is RecordState.ENDING:
            end = spoken(record.end, record.secret)
            await self._bus.record(record.gateway, end, timeout_s=_STEP_TIMEOUT_S)

    async def _swap(
        self, wish: _Wish, change: Callable[[RequestRecord, str], RequestRecord]
    ) -> RequestRecord | None:
        """The record as it stands afterwards; None if it was only just created."""
        key = wish.request.request_id
        while True:
            kept = await self._bucket.get(key)
            try:
                if kept is None:
                    await self._bucket.create(key, self._fresh(wish), ttl_s=REQUESTS.max_age_s)
                    return None
                if kept.value.state in _SETTLED:
                    return kept.value
                record = change(kept.value, wish.reason)
                await self._bucket.update(key, record, kept.revision)
            except Conflict:
                continue
            log.info("request_marked", request_id=key, state=record.state, reason=wish.reason)
            return record

    def _fresh(self, wish: _Wish) -> RequestRecord:
        """The record of a request that no scheduler has taken on: whoever does will cancel it.

        It lives as long as the request could: if that was never stored, nobody else removes it.
        """
        request = wish.request
        return RequestRecord(
            request_id=request.request_id,
            owner=self._gateway,
            gateway=request.gateway,
            state=RecordState.CANCELLING,
            deadline_unix_ms=request.deadline_unix_ms,
            cancel_reason=wish.reason,
            tenant=request.tenant,
        )

    @staticmethod
    def _cancelling(record: RequestRecord, reason: str) -> RequestRecord:
        return msgspec.structs.replace(record, state=RecordState.CANCELLING, cancel_reason=reason)

    @staticmethod
    def _ending(record: RequestRecord, reason: str) -> RequestRecord:
        end = End(
            request_id=record.request_id,
            attempt=record.attempt,
            reason=EndReason.EXPIRED,
            detail=reason,
        )
        return msgspec.structs.replace(record, state=RecordState.ENDING, end=end)

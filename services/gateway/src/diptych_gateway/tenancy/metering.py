"""Sums what tenants use into bucket `usage`; every gateway does, and no event is counted twice.

How: `policy.usage`. It costs no request anything: the schedulers' events are read, seconds later.
The gateway that added an event also counts it in its own metrics.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeGuard, cast

from diptych_bus.port import Bus, StoredItem
from diptych_contracts import subjects
from diptych_contracts.errors import Conflict, DiptychError, Transient
from diptych_contracts.events import RequestEnded
from diptych_contracts.streams import EVENTS, USAGE, USAGE_TTL_S
from diptych_contracts.usage import CURSOR, UsageCursor, UsageDay, UsageEntry, usage_key
from diptych_gateway import metrics
from diptych_policy.usage import DayOf, Ended, added, by_day
from diptych_telemetry import logger

EVERY_S = 2.0
MAX_EVENTS = 1000
"""Summed in one step."""
_STEP_S = 10.0
_ENDED = "request_ended"

log = logger(__name__)


class Metering:
    """The one who sums, here."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket = bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry)))

    async def run(self) -> None:
        """Sum every few seconds until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                async with asyncio.timeout(_STEP_S):
                    await self.catch_up()
            except (Transient, TimeoutError) as err:
                log.debug("usage_not_summed", error=str(err))

    async def catch_up(self) -> None:
        """Sum all that is new. Raises what `step` raises."""
        more = True
        while more:
            more = await self.step()

    async def step(self) -> bool:
        """Sum what is new; whether there may be more.

        Raises:
            Transient: the bus is away. What was done stands; the next step does the rest.
        """
        kept = await self._bucket.get(CURSOR)
        after_seq = kept.value.seq if kept is not None and _is_cursor(kept.value) else 0
        items, last_seq = await self._events(after_seq)
        if last_seq == after_seq:
            return False
        for day, events in by_day(items).items():
            await self._add(day, events)
        await self._advance(last_seq)
        return len(items) >= MAX_EVENTS

    async def _events(self, after_seq: int) -> tuple[list[Ended], int]:
        items: list[Ended] = []
        seq = after_seq
        stored = self._bus.all_stored(
            EVENTS.name, subject=subjects.event(_ENDED), after_seq=after_seq
        )
        async with aclosing(cast("AsyncGenerator[StoredItem, None]", stored)):
            async for item in stored:
                seq = item.seq
                try:
                    event = item.delivery.decode(RequestEnded)
                    items.append(Ended(seq, event, item.stored_unix_ms))
                except DiptychError as err:
                    log.error("event_unreadable", seq=seq, error=str(err))
                if len(items) >= MAX_EVENTS:
                    break
        return items, seq

    async def _add(self, of: DayOf, events: list[Ended]) -> None:
        key = usage_key(of.day, of.tenant)
        while True:
            kept = await self._bucket.get(key)
            day = kept.value if kept is not None else None
            assert day is None or isinstance(day, UsageDay)
            found = added(day, of, events)
            if found is None:
                return
            made, more = found
            try:
                if kept is None:
                    await self._bucket.create(key, made, ttl_s=USAGE_TTL_S)
                else:
                    await self._bucket.update(key, made, kept.revision, ttl_s=USAGE_TTL_S)
            except Conflict:
                continue
            metrics.metered(of.tenant, more)
            return

    async def _advance(self, seq: int) -> None:
        while True:
            kept = await self._bucket.get(CURSOR)
            try:
                if kept is None:
                    await self._bucket.create(CURSOR, UsageCursor(seq=seq))
                elif _is_cursor(kept.value) and kept.value.seq < seq:
                    await self._bucket.update(CURSOR, UsageCursor(seq=seq), kept.revision)
            except Conflict:
                continue
            return


def _is_cursor(entry: UsageEntry) -> TypeGuard[UsageCursor]:
    return isinstance(entry, UsageCursor)

"""The journals of the gateways this scheduler serves: followed live, read back on adoption."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from diptych_bus.port import Bus, JournalItem, Subscription
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RequestRecord
from diptych_policy.journal import JournalPart, parts
from diptych_policy.lifecycle import Event, Journalled
from diptych_policy.recovery import Ledger


@dataclass(frozen=True, slots=True)
class History:
    """What a journal says of one request."""

    parts: tuple[JournalPart, ...]
    until_seq: int
    """How far it was read."""
    whole: bool
    """Whether none of it has left the journal."""


class Journals:
    """Tells the ledger every part about its requests, in stream order."""

    def __init__(self, bus: Bus, ledger: Ledger, tell: Callable[[Event], None]) -> None:
        self._bus = bus
        self._ledger = ledger
        self._tell = tell
        self._followed: dict[Incarnation, Subscription] = {}
        self._following = asyncio.Lock()
        self._held_back: dict[RequestId, list[tuple[int, JournalPart]]] = {}
        self._reading: Counter[Incarnation] = Counter()
        """Journals that are read back: the ledger does not know of those requests yet."""

    async def follow(self, gateway: Incarnation) -> None:
        """Read `gateway`'s journal from now on; does nothing if it is read already."""
        async with self._following:
            if gateway not in self._followed:
                self._followed[gateway] = await self._bus.follow(
                    gateway, self._hear, active=lambda: gateway in self._ledger.gateways()
                )

    async def unfollow_idle(self, alive: Callable[[Incarnation], bool]) -> None:
        """Leave the journals of gateways that are gone and have no live request."""
        async with self._following:
            busy = self._ledger.gateways() | set(+self._reading)
            for gateway in [g for g in self._followed if g not in busy and not alive(g)]:
                await self._followed.pop(gateway).close()

    async def history(self, record: RequestRecord) -> History:
        """All parts of a request so far; those that arrive meanwhile are held back for it."""
        self._reading[record.gateway] += 1
        try:
            return await self._history(record)
        finally:
            self._reading[record.gateway] -= 1

    async def _history(self, record: RequestRecord) -> History:
        request_id = record.request_id
        held_back = self._held_back.setdefault(request_id, [])
        await self.follow(record.gateway)
        read: list[JournalPart] = []
        last_seq = record.journal_seq
        async for item in self._bus.read(record.gateway, after_seq=record.journal_seq):
            last_seq = item.seq
            read += [part for part in parts(item.entry) if part.request_id == request_id]
        whole = (await self._bus.span()).covers(record.journal_seq)
        read += [part for seq, part in held_back if seq > last_seq]
        del self._held_back[request_id]
        until_seq = max([last_seq, *(seq for seq, _ in held_back)])
        return History(tuple(read), until_seq, whole)

    def _hear(self, item: JournalItem) -> None:
        for part in parts(item.entry):
            if part.request_id in self._ledger:
                self._tell(Journalled(part, item.seq))
            elif part.request_id in self._held_back:
                self._held_back[part.request_id].append((item.seq, part))

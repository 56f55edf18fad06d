"""The line of writes of one tier: bounded in bytes, so what does not fit is dropped at once."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diptych_kvtiers.port import Entry, TierKey
from diptych_kvtiers.rung import Rung


@dataclass(frozen=True, slots=True)
class Waiting:
    """An entry to be written."""

    key: TierKey
    entry: Entry
    orders: int
    """How many orders to forget a tenant had come when it was put."""


class WriteLine:
    """Entries on their way to one tier."""

    def __init__(
        self, rung: Rung, limit_bytes: int, *, is_over: Callable[[str, int], bool]
    ) -> None:
        """`is_over` says whether a tenant was forgotten since that many orders."""
        self.rung = rung
        self.n_bytes = 0
        self._limit_bytes = limit_bytes
        self._is_over = is_over
        self._line: deque[Waiting] = deque()
        self._held: set[TierKey] = set()
        """In the line or being written: nothing is written twice at once."""
        self._writing: list[str] = []
        """Whose."""
        self._came, self._left = asyncio.Event(), asyncio.Event()

    def offer(self, waiting: Waiting) -> bool:
        """Whether there is room for it; it is counted as dropped if not."""
        if waiting.key in self._held:
            return True
        if self.n_bytes + len(waiting.entry) > self._limit_bytes:
            self.rung.counts.dropped += 1
            return False
        self._line.append(waiting)
        self._held.add(waiting.key)
        self.n_bytes += len(waiting.entry)
        self._came.set()
        return True

    async def write(self) -> None:
        """Write what comes, for ever. Several may do so."""
        while True:
            while not self._line:
                self._came.clear()
                await self._came.wait()
            waiting = self._line.popleft()
            self._writing.append(waiting.key.tenant_tag)
            try:
                if not self._is_over(waiting.key.tenant_tag, waiting.orders):
                    await self.rung.put(waiting.key, waiting.entry)
            finally:
                self._writing.remove(waiting.key.tenant_tag)
                self._held.discard(waiting.key)
                self.n_bytes -= len(waiting.entry)
                self._left.set()

    async def empty(self) -> None:
        """Wait until nothing is in the line, and nothing being written."""
        while self._held:
            self._left.clear()
            await self._left.wait()

    async def settled(self, tenant_tag: str) -> None:
        """Wait until nothing of a tenant's is being written."""
        while tenant_tag in self._writing:
            self._left.clear()
            await self._left.wait()

"""Entries in this process's memory.

One object for each entry, not one arena: the entry is the very object that was framed for all
tiers, so holding it copies nothing, and reading it gives a view of it that stays valid when the
entry gives way. The memory is not page-locked: no engine of ours copies from it by a device.
"""

from collections.abc import Sequence

from diptych_kvtiers.port import Entry, TierFull, TierKey, TierUsage
from diptych_kvtiers.shelf import Shelf


class HostTier:
    """Least recently used entries give way."""

    at_once = 64
    guess_bytes_per_s = 4e9
    timeout_s = 1.0

    def __init__(self, budget_bytes: int, *, name: str = "host") -> None:
        self.name = name
        self._shelf = Shelf(budget_bytes)
        self._entries: dict[TierKey, bytes] = {}
        self._evicted = 0

    async def open(self) -> None:
        """Nothing to do."""

    async def sizes(self, keys: Sequence[TierKey]) -> list[int]:
        """See the port."""
        found: list[int] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            found.append(len(entry))
        return found

    async def get(self, key: TierKey) -> Entry | None:
        """See the port."""
        self._shelf.touch(key)
        return self._entries.get(key)

    async def put(self, key: TierKey, data: Entry) -> None:
        """See the port."""
        if not self._shelf.fits(len(data)):
            raise TierFull(f"{self.name}: {len(data)} bytes, of {self._shelf.budget_bytes} in all")
        gone = self._shelf.add(key, len(data))
        for other in gone:
            del self._entries[other]
        self._evicted += len(gone)
        self._entries[key] = data if isinstance(data, bytes) else bytes(data)

    async def drop(self, key: TierKey) -> None:
        """See the port."""
        self._shelf.remove(key)
        self._entries.pop(key, None)

    async def forget(self, tenant_tag: str) -> int:
        """See the port."""
        gone = self._shelf.remove_tenant(tenant_tag)
        for key in gone:
            del self._entries[key]
        return len(gone)

    async def tend(self) -> None:
        """Nothing to do."""

    def usage(self) -> TierUsage:
        """See the port."""
        return TierUsage(
            name=self.name,
            entries=len(self._shelf),
            bytes=self._shelf.n_bytes,
            budget_bytes=self._shelf.budget_bytes,
            evicted=self._evicted,
        )

    async def close(self) -> None:
        """Let go of the memory."""
        self._entries.clear()
        self._shelf = Shelf(self._shelf.budget_bytes)

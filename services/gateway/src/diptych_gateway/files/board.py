"""All values of a bucket at hand, as a watch tells them: for lists, and for who looks for work."""

import asyncio
from collections.abc import Iterator
from typing import Generic

from diptych_bus.port import Bus, Gone, Kept, M, Subscription
from diptych_contracts.streams import BucketSpec


class Board(Generic[M]):
    """A bucket's values by key; a moment late, so whoever decides reads the bucket itself."""

    def __init__(self, bus: Bus, spec: BucketSpec, kind: type[M]) -> None:
        self.bucket = bus.bucket(spec, kind)
        self.news = asyncio.Event()
        """Set with every change; who waits for it clears it."""
        self._values: dict[str, Kept[M]] = {}
        self._watch: Subscription | None = None

    async def start(self) -> None:
        """Hear of every value."""
        self._watch = await self.bucket.watch(self._on_change)

    async def close(self) -> None:
        """Hear no more."""
        if self._watch is not None:
            await self._watch.close()

    def __iter__(self) -> Iterator[M]:
        return iter([kept.value for kept in self._values.values()])

    def note(self, kept: Kept[M]) -> None:
        """What was just written here need not come back first."""
        self._on_change(kept)

    def forget(self, key: str) -> None:
        """Nor what was just deleted."""
        self._on_change(Gone(key))

    def _on_change(self, change: Kept[M] | Gone) -> None:
        if isinstance(change, Gone):
            self._values.pop(change.key, None)
        elif (old := self._values.get(change.key)) is None or old.revision < change.revision:
            self._values[change.key] = change
        self.news.set()

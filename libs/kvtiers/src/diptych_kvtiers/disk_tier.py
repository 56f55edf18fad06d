"""Entries in files, which outlive the process and may be shared by the workers of a host.

The directory is the truth: a file that another worker has written is found without being known.
What is known, by a scan at the start and one about every minute, serves the budget only: the least
recently used files are removed for new ones. Workers that share a directory each keep the whole of
it within the budget, and see each other's files at the next scan: in between it may be exceeded by
what the others write in that time.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from diptych_contracts.errors import TierAway, TierFull
from diptych_kvtiers.disk_files import (
    LEFTOVER_S,
    MAX_ENTRY_BYTES,
    DiskFiles,
    Filed,
    on_disk,
)
from diptych_kvtiers.port import Entry, TierKey, TierUsage
from diptych_kvtiers.shelf import Shelf

T = TypeVar("T")

_THREADS = 8
_SCAN_SHARE = 100
"""A scan that took a second is not repeated for so many: at most 1 % of a thread."""


class DiskTier:
    """A directory, within a budget of bytes."""

    at_once = 4
    guess_bytes_per_s = 5e8

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        *,
        timeout_s: float = 2.0,
        leftover_s: float = LEFTOVER_S,
    ) -> None:
        self.name = f"disk:{root}"
        self.timeout_s = timeout_s
        self._files = DiskFiles(root, leftover_s=leftover_s)
        self._shelf = Shelf(budget_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-disk")
        self._writes: dict[Future[None], str] = {}
        """Under way, whoever gave up on them, and whose."""
        self._changes: dict[TierKey, int | None] | None = None
        """While a scan runs: what was stored (bytes) and removed (None) since it began."""
        self._next_scan_s = 0.0
        self._evicted = 0
        self._closed = False

    async def open(self) -> None:
        """Remove what crashes have left, see what is there."""
        await self._on_thread(self._files.prepare)
        await self._scan()

    async def sizes(self, keys: Sequence[TierKey]) -> list[int]:
        """See the port."""
        return await self._on_thread(lambda: self._sizes(keys))

    def _sizes(self, keys: Sequence[TierKey]) -> list[int]:
        found: list[int] = []
        for key in keys:
            n_bytes = self._files.size(key)
            if n_bytes is None:
                break
            found.append(n_bytes)
        return found

    async def get(self, key: TierKey) -> Entry | None:
        """See the port."""
        data = await self._on_thread(lambda: self._files.read(key))
        if data is None:
            self._removed([key])
        elif key in self._shelf:
            self._shelf.touch(key)
        elif gone := self._stored(key, len(data)):
            await self._on_thread(lambda: self._files.remove(gone))
        return data

    async def put(self, key: TierKey, data: Entry) -> None:
        """See the port. A disk that is full makes room once, by what this tier has on it."""
        most_bytes = min(self._shelf.budget_bytes, MAX_ENTRY_BYTES)
        if on_disk(len(data)) > most_bytes:
            raise TierFull(f"{len(data)} bytes, at most {most_bytes} go into a file")
        gone = self._stored(key, len(data))
        try:
            await self._written(gone, key, data)
        except TierFull:
            gone = self._shelf.make_room(2 * on_disk(len(data)))
            self._gave_way(gone)
            await self._second_try(gone, key, data)
        except BaseException:
            self._removed([key])
            raise

    async def _second_try(self, gone: Sequence[TierKey], key: TierKey, data: Entry) -> None:
        try:
            await self._written(gone, key, data)
        except BaseException:
            self._removed([key])
            raise
        self._stored(key, len(data))

    async def _written(self, gone: Sequence[TierKey], key: TierKey, data: Entry) -> None:
        self._check_open()
        writing = self._threads.submit(self._replace, gone, key, data)
        self._writes[writing] = key.tenant_tag
        writing.add_done_callback(lambda done: self._writes.pop(done, None))
        await asyncio.wrap_future(writing)

    def _replace(self, gone: Sequence[TierKey], key: TierKey, data: Entry) -> None:
        self._files.remove(gone)
        self._files.write(key, data)

    async def drop(self, key: TierKey) -> None:
        """See the port."""
        self._removed([key])
        await self._on_thread(lambda: self._files.remove([key]))

    async def forget(self, tenant_tag: str) -> int:
        """See the port."""
        for writing, whose in tuple(self._writes.items()):
            if whose == tenant_tag:
                await asyncio.wait([asyncio.wrap_future(writing)])
        gone = await self._on_thread(lambda: self._files.forget(tenant_tag))
        self._removed(self._shelf.remove_tenant(tenant_tag))
        return gone

    async def tend(self) -> None:
        """See what other workers have done, and keep the directory within its budget."""
        if time.monotonic() >= self._next_scan_s:
            await self._scan()

    async def _scan(self) -> None:
        began_s = time.monotonic()
        self._changes = {}
        try:
            await self._on_thread(self._files.sweep)
            filed = await self._on_thread(self._files.scan)
            gone = self._know(filed, self._changes)
        finally:
            self._changes = None
        took_s = time.monotonic() - began_s
        self._next_scan_s = began_s + took_s * _SCAN_SHARE
        if gone:
            await self._on_thread(lambda: self._files.remove(gone))

    def _know(self, filed: Sequence[Filed], changes: dict[TierKey, int | None]) -> list[TierKey]:
        """Hold what a scan and what was done meanwhile say; gives what has to go."""
        self._shelf = Shelf(self._shelf.budget_bytes)
        gone: list[TierKey] = []
        for entry in filed:
            gone += self._shelf.add(entry.key, on_disk(entry.n_bytes))
        for key, n_bytes in changes.items():
            self._shelf.remove(key)
            if n_bytes is not None:
                gone += self._shelf.add(key, on_disk(n_bytes))
        self._evicted += len(gone)
        return gone

    def _stored(self, key: TierKey, n_bytes: int) -> list[TierKey]:
        """Hold it; gives what has to go for it."""
        gone = self._shelf.add(key, on_disk(n_bytes))
        if self._changes is not None:
            self._changes[key] = n_bytes
        self._gave_way(gone)
        return gone

    def _gave_way(self, gone: Sequence[TierKey]) -> None:
        self._removed(gone)
        self._evicted += len(gone)

    def _removed(self, keys: Sequence[TierKey]) -> None:
        for key in keys:
            self._shelf.remove(key)
            if self._changes is not None:
                self._changes[key] = None

    def usage(self) -> TierUsage:
        """See the port; the bytes are those of whole pages."""
        return TierUsage(
            name=self.name,
            entries=len(self._shelf),
            bytes=self._shelf.n_bytes,
            budget_bytes=self._shelf.budget_bytes,
            evicted=self._evicted,
        )

    async def close(self) -> None:
        """Files stay."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, call: Callable[[], T]) -> T:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _check_open(self) -> None:
        if self._closed:
            raise TierAway("it is closed")

"""Entries in memcached: shared by a fleet, in a server's memory, so for small blocks.

An item of memcached holds a megabyte unless it was started with another `-I`, and a block is often
larger: an entry is a head, which names its parts, and the parts. Heads and parts give way one by
one, so an entry of which something is gone is a miss. Parts have a name that nobody used before: no
entry is put together of two writers' parts.

pymemcache, small and without dependencies, waits in threads.
"""

import asyncio
import contextlib
import secrets
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pymemcache.client.base import PooledClient
from pymemcache.exceptions import MemcacheError

from diptych_kvtiers.memcached_keys import all_keys
from diptych_kvtiers.port import Entry, TierAway, TierFull, TierKey, TierUsage

T = TypeVar("T")

DAY_S = 86_400
MAX_ENTRY_BYTES = 16 * 1024**2
_HEAD = struct.Struct("<4sIQ8s")  # magic, bytes of a part, bytes of the entry, name of the parts
_MAGIC = b"DKM1"
_AROUND_BYTES = 1024
"""What an item's key and bookkeeping take of its size."""
_DEFAULT_ITEM_BYTES = 1024**2
_THREADS = 8
_DOTS = 2
"""In the name of a head; its parts have more."""


class MemcachedTier:
    """One server."""

    at_once = 4
    guess_bytes_per_s = 2e8

    def __init__(self, host: str, port: int, *, ttl_s: int = DAY_S, timeout_s: float = 0.5) -> None:
        self.name = f"memcached://{host}:{port}"
        self.timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._place = (host, port)
        self._part_bytes = _DEFAULT_ITEM_BYTES - _AROUND_BYTES
        self._used_bytes: int | None = None
        self._budget_bytes: int | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-memcached")
        self._writes: dict[Future[None], str] = {}
        """Under way, whoever gave up on them, and whose."""
        self._client = PooledClient(
            (host, port),
            connect_timeout=timeout_s,
            timeout=timeout_s,
            no_delay=True,
            max_pool_size=_THREADS,
        )

    async def open(self) -> None:
        """Ask the server how large its items may be."""
        settings = await self._on_thread(lambda: self._client.stats("settings"))
        item_bytes = int(settings.get(b"item_size_max", _DEFAULT_ITEM_BYTES))
        self._part_bytes = max(_AROUND_BYTES, item_bytes - _AROUND_BYTES)
        await self.tend()

    async def sizes(self, keys: Sequence[TierKey]) -> list[int]:
        """See the port; one round trip for the heads. Parts may be gone nevertheless."""
        names = [_name(key) for key in keys]
        heads = await self._on_thread(lambda: self._client.get_many(names))
        found: list[int] = []
        for name in names:
            head = _head(heads.get(name))
            if head is None:
                break
            found.append(head[1])
        return found

    async def get(self, key: TierKey) -> Entry | None:
        """See the port."""
        return await self._on_thread(lambda: self._joined(key))

    def _joined(self, key: TierKey) -> bytes | None:
        name = _name(key)
        head = _head(self._client.get(name))
        if head is None:
            return None
        part_bytes, n_bytes, own = head
        names = _part_names(name, own, n_bytes, part_bytes)
        parts = self._client.get_many(names)
        if len(parts) < len(names):
            return None
        data = b"".join(parts[part] for part in names)
        return data if len(data) == n_bytes else None

    async def put(self, key: TierKey, data: Entry) -> None:
        """See the port."""
        if len(data) > MAX_ENTRY_BYTES:
            raise TierFull(f"{len(data)} bytes, at most {MAX_ENTRY_BYTES} go into memcached")
        writing = self._threads.submit(self._split, key, memoryview(data).cast("B"))
        self._writes[writing] = key.tenant_tag
        writing.add_done_callback(lambda done: self._writes.pop(done, None))
        async with _told():
            await asyncio.wrap_future(writing)

    def _split(self, key: TierKey, data: memoryview) -> None:
        name, own, step = _name(key), secrets.token_bytes(8), self._part_bytes
        for n, part in enumerate(_part_names(name, own, len(data), step)):
            self._set(part, bytes(data[n * step : (n + 1) * step]))
        self._set(name, _HEAD.pack(_MAGIC, step, len(data), own))

    def _set(self, name: str, value: bytes) -> None:
        if not self._client.set(name, value, expire=self._ttl_s, noreply=False):
            raise TierFull(f"{len(value)} bytes were not stored")

    async def drop(self, key: TierKey) -> None:
        """See the port; parts without a head give way by themselves."""
        await self._on_thread(lambda: self._client.delete(_name(key), noreply=False))

    async def forget(self, tenant_tag: str) -> int:
        """See the port; the server lists every key it has.

        What is still being written is waited for: its head would come after the list.
        """
        own = [writing for writing, whose in tuple(self._writes.items()) if whose == tenant_tag]
        await asyncio.gather(*map(asyncio.wrap_future, own), return_exceptions=True)
        return await self._on_thread(lambda: self._forget(f"kv1.{tenant_tag}."))

    def _forget(self, beginning: str) -> int:
        host, port = self._place
        keys = all_keys(host, port, timeout_s=self.timeout_s)
        own = [name for name in keys if name.startswith(beginning)]
        for name in own:
            self._client.delete(name, noreply=False)
        return sum(name.count(".") == _DOTS for name in own)

    async def tend(self) -> None:
        """Ask for what the server uses, of how much."""
        stats = await self._on_thread(self._client.stats)
        self._used_bytes = int(stats.get(b"bytes", 0))
        self._budget_bytes = int(stats.get(b"limit_maxbytes", 0)) or None

    def usage(self) -> TierUsage:
        """See the port: bytes and budget are of the whole server."""
        return TierUsage(name=self.name, bytes=self._used_bytes, budget_bytes=self._budget_bytes)

    async def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    async def _on_thread(self, call: Callable[[], T]) -> T:
        async with _told():
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)


@contextlib.asynccontextmanager
async def _told() -> AsyncIterator[None]:
    try:
        yield
    except MemcacheError as err:
        kind = TierFull if b"memory" in str(err).encode() else TierAway
        raise kind(f"{type(err).__name__}: {err!s:.200}") from err
    except OSError as err:
        raise TierAway(f"{type(err).__name__}: {err!s:.200}") from err


def _name(key: TierKey) -> str:
    return f"kv1.{key.tenant_tag}.{key.block}"


def _part_names(name: str, own: bytes, n_bytes: int, part_bytes: int) -> list[str]:
    return [f"{name}.{own.hex()}.{n}" for n in range(-(-n_bytes // part_bytes))]


def _head(value: object) -> tuple[int, int, bytes] | None:
    """Bytes of a part, bytes of the entry and name of the parts, if `value` is such a head."""
    if not isinstance(value, bytes) or len(value) != _HEAD.size:
        return None
    magic, part_bytes, n_bytes, own = _HEAD.unpack(value)
    if magic != _MAGIC or not 0 < n_bytes <= MAX_ENTRY_BYTES or part_bytes < _AROUND_BYTES:
        return None
    return part_bytes, n_bytes, own

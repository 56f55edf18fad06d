"""Key-value buckets in memory: compare-and-swap, TTL, watches."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from diptych_bus.lifetime import Lifetime
from diptych_bus.memory.stopping import Owned
from diptych_bus.memory.timers import Timer, Timers
from diptych_bus.port import Gone, Kept, Subscription
from diptych_bus.sizes import check_size
from diptych_contracts.errors import Conflict, StoreFull
from diptych_contracts.streams import BucketSpec
from diptych_contracts.wire import Message, decode, encode

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Value:
    """What a key holds."""

    data: bytes
    revision: int
    expiry: Timer | None = None


Watcher = Callable[[str, Value | None], None]


class BucketStore:
    """One bucket's bytes, shared by all buses of a broker."""

    def __init__(self, spec: BucketSpec, timers: Timers) -> None:
        self._spec = spec
        self._timers = timers
        self._revision = 0
        self._bytes = 0
        self.values: dict[str, Value] = {}
        self.watchers: list[Watcher] = []

    def write(self, key: str, data: bytes, *, expected: int | None, ttl_s: float | None) -> int:
        """Write `key`; `expected` is the revision it must have (0: none), None accepts any.

        Raises:
            Conflict: it has another.
            StoreFull: there is no room beside what stands there, as at the server.
        """
        check_size(key, data)
        old = self.values.get(key)
        revision = old.revision if old else 0
        if expected is not None and expected != revision:
            where = f"{self._spec.name}/{key}"
            raise Conflict(f"{where}: expected revision {expected}, it is {revision}")
        if self._bytes + len(data) > self._spec.max_bytes:
            raise StoreFull(f"bucket {self._spec.name}: maximum bytes exceeded")
        self._drop(key)
        self._revision += 1
        self._bytes += len(data)
        expiry = self._expiry(key, ttl_s)
        self._set(key, Value(data, self._revision, expiry))
        return self._revision

    def delete(self, key: str) -> None:
        """Remove `key`, if it is there."""
        if self._drop(key):
            self._revision += 1
            self._tell(key, None)

    def _expiry(self, key: str, ttl_s: float | None) -> Timer | None:
        if ttl_s is None:
            return None
        return self._timers.after(max(1, math.ceil(ttl_s)), lambda: self.delete(key))

    def _set(self, key: str, value: Value) -> None:
        self.values[key] = value
        self._tell(key, value)

    def _drop(self, key: str) -> bool:
        old = self.values.pop(key, None)
        if old is None:
            return False
        self._bytes -= len(old.data)
        if old.expiry is not None:
            old.expiry.cancel()
        return True

    def _tell(self, key: str, value: Value | None) -> None:
        for watcher in tuple(self.watchers):
            watcher(key, value)


class BucketWatch(Generic[M]):
    """One watch on a bucket."""

    def __init__(
        self,
        store: BucketStore,
        kind: type[M],
        handler: Callable[[Kept[M] | Gone], None],
        lifetime: Lifetime,
    ) -> None:
        self._store = store
        self._kind = kind
        self._handler: Callable[[Kept[M] | Gone], None] | None = handler
        self._lifetime = lifetime
        for key, value in tuple(store.values.items()):
            self._show(key, value)
        store.watchers.append(self._on_change)

    @property
    def open(self) -> bool:
        """Whether the handler may still be called."""
        return self._handler is not None

    async def close(self) -> None:
        """No handler is called after this."""
        self._handler = None
        if self._on_change in self._store.watchers:
            self._store.watchers.remove(self._on_change)

    def _on_change(self, key: str, value: Value | None) -> None:
        asyncio.get_running_loop().call_soon(self._show, key, value)

    def _show(self, key: str, value: Value | None) -> None:
        if self._handler is not None:
            self._lifetime.call(lambda _: self._report(key, value), None, f"watch {key}")

    def _report(self, key: str, value: Value | None) -> None:
        if self._handler is None:
            return
        if value is None:
            self._handler(Gone(key))
        else:
            self._handler(Kept(key, decode(value.data, self._kind), value.revision))


class Line(Protocol):
    """What a bucket needs of its bus; a structural part of `MemoryBus`."""

    lifetime: Lifetime

    async def round_trip(self) -> None:
        """Let others run; raise `BusAway` if the server stays away."""
        ...

    def own(self, subscription: Owned) -> None:
        """End `subscription` with the bus."""
        ...


class MemoryBucket(Generic[M]):
    """See `port.Bucket`."""

    def __init__(self, store: BucketStore, kind: type[M], line: Line) -> None:
        self._store = store
        self._kind = kind
        self._line = line

    async def get(self, key: str) -> Kept[M] | None:
        """The newest value."""
        await self._line.round_trip()
        value = self._store.values.get(key)
        return Kept(key, decode(value.data, self._kind), value.revision) if value else None

    async def create(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        """Write a key that must not exist; gives its revision. Raises `Conflict`."""
        return await self._write(key, value, 0, ttl_s)

    async def update(self, key: str, value: M, revision: int, *, ttl_s: float | None = None) -> int:
        """Compare-and-swap. Raises `Conflict` if `revision` is not the newest."""
        return await self._write(key, value, revision, ttl_s)

    async def put(self, key: str, value: M, *, ttl_s: float | None = None) -> int:
        """Write, whatever is there."""
        return await self._write(key, value, None, ttl_s)

    async def delete(self, key: str) -> None:
        """Remove a key and its history."""
        await self._line.round_trip()
        self._store.delete(key)

    async def watch(self, handler: Callable[[Kept[M] | Gone], None]) -> Subscription:
        """Call `handler` for every present key (before this returns), then for each change."""
        await self._line.round_trip()
        watch = BucketWatch(self._store, self._kind, handler, self._line.lifetime)
        self._line.own(watch)
        return watch

    async def _write(self, key: str, value: M, expected: int | None, ttl_s: float | None) -> int:
        data = encode(value)
        await self._line.round_trip()
        return self._store.write(key, data, expected=expected, ttl_s=ttl_s)

"""Key-value buckets in memory: compare-and-swap, TTL, watches."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from diptych_bus.lifetime import Lifetime
from diptych_bus.memory.line import Line
from diptych_bus.memory.stopping import Owned
from diptych_bus.memory.timers import Timer, Timers
from diptych_bus.port import Gone, Kept, Subscription, never
from diptych_bus.sizes import check_size
from diptych_contracts.errors import BusAway, Conflict, Permanent, StoreFull
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


class Server(Protocol):
    """What a bucket needs of its broker."""

    timers: Timers

    def lag_s(self, subject: str) -> float:
        """How late a watch hears of a change."""
        ...

    def loses_ack(self, subject: str) -> bool:
        """Whether the answer to a write is lost."""
        ...

    def later(self, delay_s: float, line: Line, action: Callable[[], None]) -> None:
        """Run `action` for the client of `line`."""
        ...


class BucketStore:
    """One bucket's bytes, shared by all buses of a broker."""

    def __init__(self, spec: BucketSpec, server: Server) -> None:
        self._spec = spec
        self.server = server
        self.subject = f"$KV.{spec.name}"
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
        return self.server.timers.after(max(1, math.ceil(ttl_s)), lambda: self.delete(key))

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
        client: "Client",
        *,
        handler: Callable[[Kept[M] | Gone], None],
        final: Callable[[M], bool],
    ) -> None:
        self._store = store
        self._kind = kind
        self._final = final
        self._handler: Callable[[Kept[M] | Gone], None] | None = handler
        self._lifetime = client.lifetime
        self._line = client.line
        self._known: dict[str, None] = {}
        self._due_s = 0.0
        self._list()
        store.watchers.append(self._on_change)
        self._unwatch = self._line.watch(self._list)

    @property
    def open(self) -> bool:
        """Whether the handler may still be called."""
        return self._handler is not None

    async def close(self) -> None:
        """No handler is called after this."""
        if self._handler is not None:
            self._handler = None
            self._store.watchers.remove(self._on_change)
            self._unwatch()

    def _list(self) -> None:
        """Show what there is, and what has gone: on coming here, and on coming back."""
        for key in [key for key in self._known if key not in self._store.values]:
            self._show(key, None)
        for key, value in tuple(self._store.values.items()):
            self._show(key, value)

    def _on_change(self, key: str, value: Value | None) -> None:
        server, now_s = self._store.server, self._store.server.timers.now_s()
        self._due_s = max(self._due_s, now_s + server.lag_s(self._store.subject))
        server.later(self._due_s - now_s, self._line, partial(self._show, key, value))

    def _show(self, key: str, value: Value | None) -> None:
        if self._handler is not None and self._line.up:
            self._lifetime.call(lambda _: self._report(key, value), None, f"watch {key}")

    def _report(self, key: str, value: Value | None) -> None:
        if self._handler is None:
            return
        if value is None:
            if key in self._known:
                del self._known[key]
                self._handler(Gone(key))
            return
        seen = decode(value.data, self._kind)
        self._known.pop(key, None)
        if not self._final(seen):
            self._known[key] = None
        self._handler(Kept(key, seen, value.revision))


class Client(Protocol):
    """What a bucket needs of its bus; a structural part of `MemoryBus`."""

    lifetime: Lifetime
    line: Line

    async def round_trip(self) -> None:
        """Let others run; raise `BusAway` if the server stays away."""
        ...

    def own(self, subscription: Owned) -> None:
        """End `subscription` with the bus."""
        ...


class MemoryBucket(Generic[M]):
    """See `port.Bucket`."""

    def __init__(self, store: BucketStore, kind: type[M], client: Client) -> None:
        self._store = store
        self._kind = kind
        self._client = client

    async def get(self, key: str) -> Kept[M] | None:
        """The newest value."""
        await self._client.round_trip()
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
        await self._client.round_trip()
        self._store.delete(key)

    async def values(self) -> list[Kept[M]]:
        """All values as they are now; one that cannot be read is left out."""
        await self._client.round_trip()
        found = []
        for key, value in self._store.values.items():
            with contextlib.suppress(Permanent):
                found.append(Kept(key, decode(value.data, self._kind), value.revision))
        return found

    async def watch(
        self, handler: Callable[[Kept[M] | Gone], None], *, final: Callable[[M], bool] = never
    ) -> Subscription:
        """Call `handler` for every present key (before this returns), then for each change."""
        await self._client.round_trip()
        watch = BucketWatch(self._store, self._kind, self._client, handler=handler, final=final)
        self._client.own(watch)
        return watch

    async def _write(self, key: str, value: M, expected: int | None, ttl_s: float | None) -> int:
        data = encode(value)
        await self._client.round_trip()
        revision = self._store.write(key, data, expected=expected, ttl_s=ttl_s)
        if expected is not None and self._store.server.loses_ack(self._store.subject):
            raise BusAway(f"no answer to the write of {key}")
        return revision

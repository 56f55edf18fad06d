"""Entries in the bus's object store: shared by a fleet that has no other store.

Each is a message per 128 KiB, through the server that carries everything else: it is for small
models and few hits. The bucket has a limit and an age of its own; within it this tier keeps to its
budget by removing the oldest, about once a minute and when the bucket is full. A listing has names
only, so every entry is taken to be as large as the last one seen. A listing is believed for a few
seconds: what is stale in it is a miss.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from diptych_contracts.errors import BusAway, DiptychError, StoreFull, Transient
from diptych_contracts.streams import KV_BLOCKS
from diptych_contracts.tiers import BLOCK_CHARS, TENANT_TAG_CHARS, is_hex
from diptych_kvtiers.port import Entry, TierAway, TierFull, TierKey, TierUsage

MAX_ENTRY_BYTES = 16 * 1024**2
_GUESS_BYTES = 1024**2
_BELIEVED_S = 3.0
_AT_ONCE = 8
_NEVER = float("-inf")


class ObjectBus(Protocol):
    """What is needed of the bus."""

    async def put_object(self, bucket: str, name: str, data: bytes) -> None:
        """Store a large value."""
        ...

    async def get_object(self, bucket: str, name: str) -> bytes | None:
        """The newest value."""
        ...

    async def delete_object(self, bucket: str, name: str) -> None:
        """Remove a value."""
        ...

    async def object_names(self, bucket: str) -> list[str]:
        """All names, the oldest first."""
        ...


class BusTier:
    """The bucket `kv-blocks`."""

    name = "bus"
    at_once = 2
    guess_bytes_per_s = 3e7

    def __init__(self, bus: ObjectBus, budget_bytes: int, *, timeout_s: float = 5.0) -> None:
        self.timeout_s = timeout_s
        self._bus = bus
        self._budget_bytes = budget_bytes
        self._names: dict[str, None] = {}
        """As listed, the oldest first; and what was stored since."""
        self._listed_s = _NEVER
        self._entry_bytes = _GUESS_BYTES
        self._evicted = 0

    async def open(self) -> None:
        """See what is there."""
        await self._list()

    async def sizes(self, keys: Sequence[TierKey]) -> list[int]:
        """See the port."""
        if time.monotonic() - self._listed_s > _BELIEVED_S:
            await self._list()
        found: list[int] = []
        for key in keys:
            if _name(key) not in self._names:
                break
            found.append(self._entry_bytes)
        return found

    async def get(self, key: TierKey) -> Entry | None:
        """See the port; an object of which a part is gone is a miss."""
        async with _told():
            try:
                data = await self._bus.get_object(KV_BLOCKS, _name(key))
            except BusAway:
                raise
            except Transient:
                data = None
        if not data:  # No entry is empty.
            return None
        self._entry_bytes = len(data)
        return data

    async def put(self, key: TierKey, data: Entry) -> None:
        """See the port; in a full bucket the oldest give way once."""
        if len(data) > min(MAX_ENTRY_BYTES, self._budget_bytes):
            limit = min(MAX_ENTRY_BYTES, self._budget_bytes)
            raise TierFull(f"{len(data)} bytes, at most {limit} go onto the bus")
        self._entry_bytes = len(data)
        async with _told():
            try:
                await self._bus.put_object(KV_BLOCKS, _name(key), bytes(data))
            except StoreFull:
                await self._remove(list(self._names)[:_AT_ONCE])
                await self._bus.put_object(KV_BLOCKS, _name(key), bytes(data))
        self._names[_name(key)] = None

    async def drop(self, key: TierKey) -> None:
        """See the port."""
        async with _told():
            await self._bus.delete_object(KV_BLOCKS, _name(key))
        self._names.pop(_name(key), None)

    async def forget(self, tenant_tag: str) -> int:
        """See the port."""
        await self._list()
        own = [name for name in self._names if name.startswith(f"{tenant_tag}.")]
        async with _told():
            await self._remove(own, evicted=False)
        return len(own)

    async def tend(self) -> None:
        """Remove the oldest beyond the budget."""
        await self._list()
        most = self._budget_bytes // self._entry_bytes
        async with _told():
            await self._remove(list(self._names)[: max(0, len(self._names) - most)])

    async def _list(self) -> None:
        async with _told():
            names = await self._bus.object_names(KV_BLOCKS)
        self._names = dict.fromkeys(name for name in names if _is_ours(name))
        self._listed_s = time.monotonic()

    async def _remove(self, names: Sequence[str], *, evicted: bool = True) -> None:
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            await asyncio.gather(*(self._bus.delete_object(KV_BLOCKS, name) for name in some))
            for name in some:
                self._names.pop(name, None)
            self._evicted += len(some) if evicted else 0

    def usage(self) -> TierUsage:
        """See the port: of the whole bucket, as last listed."""
        return TierUsage(
            name=self.name,
            entries=len(self._names),
            bytes=len(self._names) * self._entry_bytes,
            budget_bytes=self._budget_bytes,
            evicted=self._evicted,
        )

    async def close(self) -> None:
        """The bus is its owner's to close."""


def _name(key: TierKey) -> str:
    return f"{key.tenant_tag}.{key.block}"


def _is_ours(name: str) -> bool:
    tenant_tag, _, block = name.partition(".")
    return is_hex(tenant_tag, TENANT_TAG_CHARS) and is_hex(block, BLOCK_CHARS)


@contextlib.asynccontextmanager
async def _told() -> AsyncIterator[None]:
    try:
        yield
    except StoreFull as err:
        raise TierFull(f"{err!s:.200}") from err
    except TierAway:
        raise
    except DiptychError as err:
        raise TierAway(f"{type(err).__name__}: {err!s:.200}") from err

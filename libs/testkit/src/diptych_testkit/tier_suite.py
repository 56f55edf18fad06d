"""What every tier of KV blocks must do, whatever it keeps them in; and tiers made for tests."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from random import Random

from diptych_contracts.tiers import TierKey
from diptych_kvtiers.host_tier import HostTier
from diptych_kvtiers.port import Entry, Tier

WAIT_S = 60.0
"""Longest wait for what a healthy machine does in milliseconds."""


def tier_key(number: int, tenant: str = "acme") -> TierKey:
    """The key of some block of a tenant's."""
    tag = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
    return TierKey(tag, hashlib.blake2b(f"{tenant}/{number}".encode()).hexdigest()[:64])


def tier_block(number: int, n_bytes: int = 100_000) -> bytes:
    """Bytes of some block: the same for the same number."""
    return Random(number).randbytes(n_bytes)


async def check_tier(tier: Tier) -> None:
    """Everything the port promises of an open, empty tier."""
    keys = [tier_key(n) for n in range(5)]
    other = tier_key(0, "other")
    assert await tier.get(keys[0]) is None
    assert list(await tier.sizes(keys)) == []
    await tier.drop(keys[0])
    assert await tier.forget(keys[0].tenant_tag) == 0
    for n in (0, 1, 3):
        await tier.put(keys[n], memoryview(tier_block(n)) if n else tier_block(n))
    await tier.put(keys[0], tier_block(0))  # again
    await tier.put(other, tier_block(9))
    assert len(await tier.sizes(keys)) == 2, "the run ends at the first that is absent"
    assert len(await tier.sizes(keys[2:])) == 0
    for n in (0, 1, 3):
        entry = await tier.get(keys[n])
        assert entry is not None
        assert bytes(entry) == tier_block(n)
    await tier.drop(keys[1])
    assert await tier.get(keys[1]) is None
    assert len(await tier.sizes(keys)) == 1
    await tier.tend()
    assert await tier.forget(keys[0].tenant_tag) == 2
    assert [await tier.get(key) for key in keys] == [None] * 5
    kept = await tier.get(other)
    assert kept is not None
    assert bytes(kept) == tier_block(9)
    usage = tier.usage()
    assert usage.name == tier.name
    assert "@" not in usage.name


class StubbornTier(HostTier):
    """A tier in memory that can be told to fail, to hang, or to be slow."""

    def __init__(self, name: str = "stubborn", *, timeout_s: float = 1.0) -> None:
        super().__init__(1 << 30, name=name)
        self.timeout_s = timeout_s
        self.fails: Exception | None = None
        self.hangs = False
        self.calls = 0
        self.passes = asyncio.Event()
        """Cleared, a `put` waits before it stores."""
        self.passes.set()

    async def _obey(self) -> None:
        self.calls += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails is not None:
            raise self.fails

    async def open(self) -> None:
        await self._obey()

    async def sizes(self, keys: Sequence[TierKey]) -> list[int]:
        await self._obey()
        return await super().sizes(keys)

    async def get(self, key: TierKey) -> Entry | None:
        await self._obey()
        return await super().get(key)

    async def put(self, key: TierKey, data: Entry) -> None:
        await self._obey()
        await self.passes.wait()
        await super().put(key, data)

    async def forget(self, tenant_tag: str) -> int:
        await self._obey()
        return await super().forget(tenant_tag)

    async def tend(self) -> None:
        await self._obey()


async def until(true: Callable[[], bool], what: str) -> None:
    """Wait for what a task of somebody else's will make true."""
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s, f"not within {WAIT_S:.0f} s: {what}"
        await asyncio.sleep(0.01)

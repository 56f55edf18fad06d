"""What tiers give: `python bench/tiers.py` (half a minute; needs no weights).

Blocks as large as those of SmolLM2-135M go into each kind of tier and come out again, framed and
verified as by a worker, eight at a time. Redis and memcached run on this machine if they are
installed, JetStream always does; the object store is a directory. Disk is read from the page cache.

    put     GB/s from the first block handed over to the last one stored
    read    GB/s from the first block asked for to the last one verified
    find    milliseconds to learn that all of them are there
    sealed  read, with a fleet key
"""

import argparse
import asyncio
import contextlib
import itertools
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from diptych_bus.jetstream.bus import JetStreamBus
from diptych_kvtiers.bus_tier import BusTier
from diptych_kvtiers.disk_tier import DiskTier
from diptych_kvtiers.host_tier import HostTier
from diptych_kvtiers.memcached_tier import MemcachedTier
from diptych_kvtiers.object_tier import ObjectTier
from diptych_kvtiers.port import Tier
from diptych_kvtiers.redis_tier import RedisTier
from diptych_kvtiers.stack import StackLimits, TierStack
from diptych_testkit.nats import running_nats
from diptych_testkit.store_servers import missing_servers, running_memcached, running_redis
from diptych_testkit.tier_suite import tier_block, tier_key

LIMITS = StackLimits(waiting_bytes=1 << 32, start_s=30.0, find_s=30.0)
WAIT_S = 300.0


@contextlib.asynccontextmanager
async def stores(folder: Path) -> AsyncIterator[list[Tier]]:
    """A tier of each kind that can be had here."""
    async with contextlib.AsyncExitStack() as held:
        tiers: list[Tier] = [HostTier(1 << 32), DiskTier(folder / "disk", 1 << 34, timeout_s=60)]
        tiers.append(ObjectTier(f"file://{folder}/objects", timeout_s=60))
        if not missing_servers():
            for name in ("redis", "memcached"):
                (folder / name).mkdir()
            redis = held.enter_context(running_redis(folder / "redis"))
            tiers.append(RedisTier(f"redis://127.0.0.1:{redis.port}", timeout_s=60))
            memcached = held.enter_context(running_memcached(folder / "memcached", "-m", "2048"))
            tiers.append(MemcachedTier("127.0.0.1", memcached.port, timeout_s=60))
        nats = held.enter_context(running_nats(folder / "nats"))
        bus = await JetStreamBus.connect(nats.url, name="bench", wait_s=60)
        held.push_async_callback(bus.close)
        tiers.append(BusTier(bus, 1 << 32, timeout_s=60))
        yield tiers


async def measured(tier: Tier, blocks: list[bytes], fleet_key: bytes | None) -> list[float]:
    """Seconds to put, to find and to read."""
    stack = TierStack([tier], fleet_key=fleet_key, limits=LIMITS)
    keys = [tier_key(n) for n in range(len(blocks))]
    await stack.start()
    times = [time.perf_counter()]
    for key, block in zip(keys, blocks, strict=True):
        stack.put(key, block)
    assert await stack.flush(WAIT_S)
    times.append(time.perf_counter())
    found = await stack.find(keys)
    times.append(time.perf_counter())
    got = await stack.read(keys, timeout_s=WAIT_S)
    times.append(time.perf_counter())
    assert found.n_blocks == len(got) == len(blocks), stack.usage()
    await stack.forget(keys[0].tenant_tag)
    for task in stack._tasks:
        task.cancel()
    await asyncio.gather(*stack._tasks, return_exceptions=True)
    return [after - before for before, after in itertools.pairwise(times)]


def spread(values: list[float], digits: int) -> str:
    """Median, and from where to where."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


async def main(n_blocks: int, n_bytes: int, runs: int) -> None:
    blocks = [tier_block(n, n_bytes) for n in range(n_blocks)]
    total_gb = n_blocks * n_bytes / 1e9
    print(f"{platform.processor() or platform.machine()}, {n_blocks} blocks of {n_bytes} bytes")
    print("| tier | put, GB/s | find, ms | read, GB/s | sealed, GB/s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        async with stores(Path(folder)) as tiers:
            for tier in tiers:
                plain = [await measured(tier, blocks, None) for _ in range(runs)]
                sealed = [await measured(tier, blocks, bytes(32)) for _ in range(runs)]
                cells = [
                    spread([total_gb / put_s for put_s, _, _ in plain], 2),
                    spread([1e3 * find_s for _, find_s, _ in plain], 1),
                    spread([total_gb / read_s for _, _, read_s in plain], 2),
                    spread([total_gb / read_s for _, _, read_s in sealed], 2),
                ]
                print(f"| {tier.name.partition(':')[0]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--bytes", type=int, default=1_480_000)
    parser.add_argument("--runs", type=int, default=3)
    told = parser.parse_args()
    asyncio.run(main(told.blocks, told.bytes, told.runs))

"""Tiers on real servers: Redis (or Valkey), memcached and JetStream, killed, frozen and full."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diptych_bus.jetstream.bus import JetStreamBus
from diptych_contracts.streams import KV_BLOCKS
from diptych_kvtiers.bus_tier import BusTier
from diptych_kvtiers.host_tier import HostTier
from diptych_kvtiers.memcached_tier import MemcachedTier
from diptych_kvtiers.port import Tier, TierAway, TierFull
from diptych_kvtiers.redis_tier import RedisTier
from diptych_kvtiers.stack import Forgotten, StackLimits, TierStack
from diptych_testkit.nats import running_nats
from diptych_testkit.store_servers import (
    StoreServer,
    missing_servers,
    running_memcached,
    running_redis,
)
from diptych_testkit.tier_suite import WAIT_S, check_tier, tier_block, tier_key, until

KEYS = [tier_key(n) for n in range(40)]
LIMITS = StackLimits(start_s=WAIT_S, find_s=WAIT_S)

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(bool(missing_servers()), reason=f"not installed: {missing_servers()}"),
]

Make = Callable[[StoreServer], Tier]


def redis_tier(server: StoreServer) -> Tier:
    return RedisTier(f"redis://127.0.0.1:{server.port}", timeout_s=30.0)


def memcached_tier(server: StoreServer) -> Tier:
    return MemcachedTier("127.0.0.1", server.port, timeout_s=30.0)


@pytest.fixture(params=["redis", "memcached"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[StoreServer, Make]]:
    if request.param == "redis":
        with running_redis(tmp_path) as server:
            yield server, redis_tier
    else:
        with running_memcached(tmp_path, "-m", "256") as server:
            yield server, memcached_tier


@asynccontextmanager
async def stack_of(*tiers: Tier) -> AsyncIterator[TierStack]:
    stack = TierStack(tiers, limits=LIMITS)
    await stack.start()
    try:
        yield stack
    finally:
        await stack.close()


async def blocks(stack: TierStack) -> list[bytes]:
    return [bytes(block) for block in await stack.read(KEYS, timeout_s=WAIT_S)]


async def fill(stack: TierStack, count: int, n_bytes: int = 100_000) -> None:
    for n in range(count):
        assert stack.put(KEYS[n], tier_block(n, n_bytes))
    assert await stack.flush(WAIT_S)


async def test_a_server_is_a_tier(store: tuple[StoreServer, Make]) -> None:
    server, make = store
    tier = make(server)
    await tier.open()
    await check_tier(tier)
    usage = tier.usage()
    assert usage.bytes is not None
    await tier.close()


async def test_blocks_of_megabytes_are_kept(store: tuple[StoreServer, Make]) -> None:
    """A block of SmolLM2-135M has 1.5 MB; an item of memcached at most one."""
    server, make = store
    async with stack_of(make(server)) as stack:
        await fill(stack, 8, 3_100_000)
        found = await stack.find(KEYS)
        assert found.n_blocks == 8
        assert found.n_bytes == 8 * 3_100_080
        assert await blocks(stack) == [tier_block(n, 3_100_000) for n in range(8)]
        assert stack.usage()[0].read_bytes_per_s > 0
        assert (await stack.forget(KEYS[0].tenant_tag)).entries == 8
        assert await blocks(stack) == []


async def test_what_one_worker_stored_another_reads(store: tuple[StoreServer, Make]) -> None:
    server, make = store
    async with stack_of(make(server)) as one, stack_of(HostTier(1 << 30), make(server)) as two:
        await fill(one, 5)
        assert await blocks(two) == [tier_block(n) for n in range(5)]
        assert await two.flush(WAIT_S)
        assert (await two.find(KEYS)).tiers == ("host",) * 5
        assert await two.forget(KEYS[0].tenant_tag) == Forgotten(entries=5)
        assert await blocks(one) == []


async def test_a_killed_server_is_a_miss_and_comes_back(store: tuple[StoreServer, Make]) -> None:
    server, make = store
    async with stack_of(make(server)) as stack:
        await fill(stack, 5)
        server.kill()
        assert await blocks(stack) == []
        assert stack.usage()[0].away
        assert (await stack.find(KEYS)).n_blocks == 0
        assert (await stack.forget(KEYS[0].tenant_tag)).unreachable == (stack.usage()[0].name,)
        await fill(stack, 5)
        server.start()
        await until(lambda: not stack.usage()[0].forgetting, "it is told to forget")
        await fill(stack, 5)
        assert await blocks(stack) == [tier_block(n) for n in range(5)]
        assert stack.usage()[0].away == ""


async def test_a_server_killed_under_load_is_a_miss(store: tuple[StoreServer, Make]) -> None:
    """Killed at some place in the middle of gets and puts: whole blocks or none."""
    server, make = store
    async with stack_of(make(server)) as stack:
        await fill(stack, 40)
        over = asyncio.Event()
        seen: list[int] = []

        async def load() -> None:
            while not over.is_set():
                got = await blocks(stack)
                assert got == [tier_block(n) for n in range(len(got))]
                seen.append(len(got))
                for n in range(40):
                    stack.put(tier_key(n, "other"), tier_block(n))

        loads = [asyncio.create_task(load()) for _ in range(3)]
        await until(lambda: 40 in seen, "blocks are read")
        server.kill()
        await until(lambda: bool(stack.usage()[0].away), "it is noticed")
        await until(lambda: seen[-1] == 0, "reads are misses")
        over.set()
        await asyncio.gather(*loads)
        assert stack.usage()[0].corrupt == 0


async def test_a_frozen_server_is_a_miss_in_time_and_thaws(
    store: tuple[StoreServer, Make],
) -> None:
    """It takes what is sent and answers nothing: the tier's own time ends that."""
    server, _ = store
    tiers: dict[str, Tier] = {
        "redis": RedisTier(f"redis://127.0.0.1:{server.port}", timeout_s=3.0),
        "memcached": MemcachedTier("127.0.0.1", server.port, timeout_s=3.0),
    }
    tier = tiers["redis" if "redis" in server.command[0] else "memcached"]
    async with stack_of(HostTier(1 << 30), tier) as stack:
        await fill(stack, 3)
        server.freeze()
        for n in range(3):
            await stack._rungs[0].tier.drop(KEYS[n])
        async with asyncio.timeout(WAIT_S):
            assert await blocks(stack) == []
        assert stack.usage()[1].away
        assert stack.put(KEYS[0], tier_block(0))
        assert await stack.flush(WAIT_S)
        assert await blocks(stack) == [tier_block(0)], "memory has it"
        server.thaw()

        async def is_back() -> bool:
            await stack.read([KEYS[2]], timeout_s=WAIT_S)
            return stack.usage()[1].away == ""

        async with asyncio.timeout(WAIT_S):
            while not await is_back():
                await asyncio.sleep(0.1)
        async with asyncio.timeout(WAIT_S):
            while await blocks(stack) != [tier_block(n) for n in range(3)]:
                await asyncio.sleep(0.1)


async def test_a_redis_without_room_can_be_read(tmp_path: Path) -> None:
    with running_redis(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as redis:
        tier = redis_tier(redis)
        async with stack_of(tier) as stack:
            await fill(stack, 1)
            for n in range(1, 40):
                stack.put(tier_key(n), tier_block(n, 1_000_000))
            assert await stack.flush(WAIT_S)
            with pytest.raises(TierFull):
                await tier.put(tier_key(41), tier_block(41, 1_000_000))
            assert (await blocks(stack))[:1] == [tier_block(0)]
            usage = stack.usage()[0]
            assert usage.dropped > 0
            assert "maxmemory" in usage.away
            assert usage.budget_bytes == 6 * 1024**2


async def test_a_small_memcached_lets_parts_give_way(tmp_path: Path) -> None:
    """An entry of which something is gone is a miss, not a wrong block."""
    with running_memcached(tmp_path, "-m", "8") as memcached:
        async with stack_of(memcached_tier(memcached)) as stack:
            for n in range(40):
                stack.put(KEYS[n], tier_block(n, 1_500_000))
                assert await stack.flush(WAIT_S)
            there = 0
            for n in range(40):
                got = await stack.read([KEYS[n]], timeout_s=WAIT_S)
                assert [bytes(block) for block in got] in ([], [tier_block(n, 1_500_000)])
                there += len(got)
            assert 0 < there < 40
            assert stack.usage()[0].corrupt == 0


async def test_a_memcached_of_other_items(tmp_path: Path) -> None:
    with running_memcached(tmp_path, "-m", "256", "-I", "8m") as memcached:
        tier = MemcachedTier("127.0.0.1", memcached.port, timeout_s=30.0)
        await tier.open()
        await tier.put(KEYS[0], tier_block(0, 7_000_000))
        assert await tier.get(KEYS[0]) == tier_block(0, 7_000_000)
        with pytest.raises(TierFull):
            await tier.put(KEYS[1], bytes(17 * 1024**2))
        await tier.close()


async def test_a_password_is_used_and_not_shown(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        plain = RedisTier(f"redis://127.0.0.1:{redis.port}", timeout_s=5.0)
        await plain._redis.config_set("requirepass", "hush")
        tier = RedisTier(f"redis://:hush@127.0.0.1:{redis.port}/1", timeout_s=5.0)
        await tier.open()
        await check_tier(tier)
        other = RedisTier(f"redis://:wrong@127.0.0.1:{redis.port}", timeout_s=5.0)
        with pytest.raises(TierAway) as told:
            await other.open()
        assert "wrong" not in str(told.value)
        for made in (plain, tier, other):
            assert "hush" not in repr(made.usage())
            await made.close()


async def test_the_bus_is_a_tier_and_its_loss_a_miss(tmp_path: Path) -> None:
    with running_nats(tmp_path) as nats:
        bus = await JetStreamBus.connect(nats.url, name="tiers", wait_s=WAIT_S)
        try:
            tier = BusTier(bus, 1 << 30, timeout_s=10.0)
            async with stack_of(tier) as stack:
                await check_tier(tier)
                await fill(stack, 5, 400_000)
                assert await blocks(stack) == [tier_block(n, 400_000) for n in range(5)]
                assert len(await bus.object_names(KV_BLOCKS)) == 6
                assert (await stack.find(KEYS)).n_blocks == 5
                assert (await stack.forget(KEYS[0].tenant_tag)).entries == 5
                assert await blocks(stack) == []
                await fill(stack, 1)
                nats.stop_blocking()
                assert await blocks(stack) == []
                assert stack.usage()[0].away
                nats.start_blocking()
                async with asyncio.timeout(WAIT_S):
                    while await blocks(stack) != [tier_block(0, 100_000)]:
                        await asyncio.sleep(0.1)
                assert stack.usage()[0].away == ""
        finally:
            await bus.close()

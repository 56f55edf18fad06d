import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from diptych_contracts.errors import TierAway, TierFull
from diptych_contracts.tiers import TierKey
from diptych_kvtiers.entry import Framer
from diptych_kvtiers.host_tier import HostTier
from diptych_kvtiers.port import Tier
from diptych_kvtiers.stack import Forgotten, Found, StackLimits, TierStack
from diptych_testkit.tier_suite import (
    WAIT_S,
    StubbornTier,
    check_tier,
    tier_block,
    tier_key,
    until,
)

KEYS = [tier_key(n) for n in range(8)]
KEY = bytes(range(32))


@asynccontextmanager
async def stack_of(
    *tiers: Tier, fleet_key: bytes | None = None, limits: StackLimits | None = None
) -> AsyncIterator[TierStack]:
    stack = TierStack(tiers, fleet_key=fleet_key, limits=limits or StackLimits(find_s=WAIT_S))
    await stack.start()
    try:
        yield stack
    finally:
        await stack.close()


async def blocks(stack: TierStack, keys: Sequence[TierKey] = KEYS) -> list[bytes]:
    return [bytes(block) for block in await stack.read(keys, timeout_s=WAIT_S)]


async def fill(stack: TierStack, numbers: Sequence[int] = range(8)) -> None:
    for n in numbers:
        assert stack.put(KEYS[n], tier_block(n))
    assert await stack.flush(WAIT_S)


async def test_host_memory_is_a_tier() -> None:
    tier = HostTier(1 << 20)
    await check_tier(tier)
    await tier.close()


async def test_host_memory_keeps_to_its_budget() -> None:
    tier = HostTier(250_000)
    for n in range(5):
        await tier.put(KEYS[n], tier_block(n))
    assert [await tier.get(key) is None for key in KEYS[:5]] == [True, True, True, False, False]
    usage = tier.usage()
    assert (usage.entries, usage.bytes, usage.evicted) == (2, 200_000, 3)
    with pytest.raises(TierFull):
        await tier.put(KEYS[5], bytes(250_001))
    assert tier.usage().entries == 2


@pytest.mark.parametrize("fleet_key", [None, KEY])
async def test_what_is_put_is_found_and_read(fleet_key: bytes | None) -> None:
    fast, slow = HostTier(1 << 30), StubbornTier()
    async with stack_of(fast, slow, fleet_key=fleet_key) as stack:
        await fill(stack)
        found = await stack.find(KEYS)
        assert found.n_blocks == 8
        assert found.n_bytes == 8 * (100_000 + Framer(fleet_key).overhead_bytes)
        assert found.tiers == ("host",) * 8
        assert 0 < found.read_s < 1
        assert await blocks(stack) == [tier_block(n) for n in range(8)]
        usage = {usage.name: usage for usage in stack.usage()}
        assert (usage["host"].hits, usage["host"].stored) == (8, 8)
        assert (usage["stubborn"].hits, usage["stubborn"].stored) == (0, 8)


async def test_only_the_leading_run_counts() -> None:
    async with stack_of(HostTier(1 << 30)) as stack:
        await fill(stack, (0, 1, 3))
        assert (await stack.find(KEYS)).n_blocks == 2
        assert await blocks(stack) == [tier_block(0), tier_block(1)]
        assert await stack.find(KEYS[2:]) == Found()
        assert await stack.find([]) == Found()
        assert await blocks(stack, []) == []


async def test_a_run_goes_on_over_tiers() -> None:
    """One tier has 0, 1, 4; another 2, 3, 5 and 1: neither has a run of more than two."""
    fast, slow = HostTier(1 << 30, name="fast"), HostTier(1 << 30, name="slow")
    for n in (0, 1, 4):
        await fast.put(KEYS[n], Framer().framed(KEYS[n], tier_block(n)))
    for n in (1, 2, 3, 5):
        await slow.put(KEYS[n], Framer().framed(KEYS[n], tier_block(n)))
    async with stack_of(fast, slow) as stack:
        found = await stack.find(KEYS)
        assert found.tiers == ("fast", "fast", "slow", "slow", "fast", "slow")
        assert await blocks(stack) == [tier_block(n) for n in range(6)]


async def test_what_a_slow_tier_gave_goes_to_the_faster_ones() -> None:
    fast, slow = HostTier(1 << 30), StubbornTier()
    await slow.put(KEYS[0], Framer().framed(KEYS[0], tier_block(0)))
    async with stack_of(fast, slow) as stack:
        assert await blocks(stack) == [tier_block(0)]
        assert await stack.flush(WAIT_S)
        slow.fails = TierAway("gone")
        assert await blocks(stack) == [tier_block(0)]
        assert (await stack.find(KEYS)).tiers == ("host",)


@pytest.mark.parametrize(
    "failure", [TierAway("gone"), TierFull("full"), OSError("disk"), ZeroDivisionError("a bug")]
)
async def test_whatever_a_tier_raises_is_a_miss(failure: Exception) -> None:
    fast, slow = HostTier(1 << 30), StubbornTier()
    async with stack_of(fast, slow) as stack:
        slow.fails = failure
        await fill(stack, (0, 1))
        assert await blocks(stack) == [tier_block(0), tier_block(1)]
        assert (await stack.find(KEYS)).n_blocks == 2
        usage = stack.usage()[1]
        assert usage.errors > 0
        assert usage.away
        assert usage.stored == 0


async def test_a_tier_that_failed_is_left_alone() -> None:
    slow = StubbornTier()
    async with stack_of(slow) as stack:
        slow.fails = TierAway("gone")
        assert await blocks(stack, KEYS[:1]) == []
        calls = slow.calls
        for _ in range(50):
            assert await blocks(stack) == []
            await stack.find(KEYS)
        assert slow.calls - calls <= 2, "it is tried again after a second at the earliest"
        slow.fails = None
        await slow.put(KEYS[0], Framer().framed(KEYS[0], tier_block(0)))
        await until_read(stack, KEYS[:1])
        assert stack.usage()[0].away == ""


async def until_read(stack: TierStack, keys: Sequence[TierKey]) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(await stack.read(keys, timeout_s=WAIT_S)) < len(keys):
            await asyncio.sleep(0.05)


async def test_a_full_tier_can_be_read() -> None:
    slow = StubbornTier()
    async with stack_of(slow) as stack:
        await fill(stack, (0,))
        put = slow.put

        async def full(key: TierKey, data: object) -> None:
            raise TierFull("no room")

        slow.put = full  # type: ignore[method-assign]
        await fill(stack, (1, 2, 3))
        assert await blocks(stack) == [tier_block(0)]
        usage = stack.usage()[0]
        assert (usage.away, usage.dropped, usage.errors) == ("no room", 3, 1)
        slow.put = put  # type: ignore[method-assign]


async def test_a_tier_that_hangs_is_a_miss_and_then_left_alone() -> None:
    slow = StubbornTier(timeout_s=0.05)
    async with stack_of(slow) as stack:
        await fill(stack, (0,))
        slow.hangs = True
        assert await blocks(stack, KEYS[:1]) == []
        assert "no answer" in stack.usage()[0].away


async def test_a_crowd_waits_for_its_turn_before_the_tier_s_time_begins() -> None:
    """Forty readers of a store that serves two: none of them makes it look hung."""
    slow = StubbornTier(timeout_s=1000.0)
    slow.at_once = 2
    inside, most = 0, 0
    get = slow.get

    async def counted(key: TierKey) -> object:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        return await get(key)

    async with stack_of(slow) as stack:
        await fill(stack)
        slow.get = counted  # type: ignore[method-assign, assignment]
        got = await asyncio.gather(*(blocks(stack) for _ in range(40)))
        assert all(one == [tier_block(n) for n in range(8)] for one in got)
        assert most == 2
        assert stack.usage()[0].errors == 0


async def test_find_does_not_wait_for_a_slow_tier() -> None:
    fast, slow = HostTier(1 << 30), StubbornTier(timeout_s=1000.0)
    async with stack_of(fast, slow, limits=StackLimits(find_s=0.05)) as stack:
        await fill(stack, (0, 1))
        slow.hangs = True
        assert (await stack.find(KEYS)).n_blocks == 2


async def test_read_ends_with_its_time() -> None:
    fast, slow = HostTier(1 << 30), StubbornTier(timeout_s=1000.0)
    async with stack_of(fast, slow) as stack:
        await fill(stack, (0, 1))
        slow.hangs = True
        got = await stack.read(KEYS, timeout_s=0.2)
        assert [bytes(block) for block in got] == [tier_block(0), tier_block(1)]


async def test_a_tier_that_cannot_be_opened_is_away_until_it_can() -> None:
    slow = StubbornTier()
    slow.fails = TierAway("not yet")
    async with stack_of(slow) as stack:
        assert stack.usage()[0].away == "not yet"
        assert stack.put(KEYS[0], tier_block(0))
        assert await stack.flush(WAIT_S)
        slow.fails = None
        await until(lambda: stack.usage()[0].away == "", "it is opened")
        await fill(stack, (1,))
        assert await blocks(stack, KEYS[1:2]) == [tier_block(1)]


def altered(entry: bytes) -> bytes:
    return entry[:-1] + bytes([entry[-1] ^ 1])


@pytest.mark.parametrize(
    "spoil",
    [altered, lambda entry: entry[:-1], lambda entry: b"", lambda entry: entry[:40]],
    ids=["flipped", "cut", "empty", "half a head"],
)
@pytest.mark.parametrize("fleet_key", [None, KEY])
async def test_a_spoilt_entry_is_dropped_and_a_miss(
    spoil: Callable[[bytes], bytes], fleet_key: bytes | None
) -> None:
    fast, slow = HostTier(1 << 30, name="fast"), HostTier(1 << 30, name="slow")
    good = Framer(fleet_key).framed(KEYS[0], tier_block(0))
    await fast.put(KEYS[0], spoil(good))
    await slow.put(KEYS[0], good)
    async with stack_of(fast, slow, fleet_key=fleet_key) as stack:
        assert await blocks(stack, KEYS[:1]) == [tier_block(0)], "the next tier has it whole"
        assert await stack.flush(WAIT_S)
        first = stack.usage()[0]
        assert (first.corrupt, first.hits, first.misses) == (1, 0, 1)
        assert await fast.get(KEYS[0]) == good, "and it is promoted in place of the spoilt one"


async def test_the_line_of_writes_is_bounded() -> None:
    slow = StubbornTier(timeout_s=1000.0)
    limits = StackLimits(waiting_bytes=500_000, writers=1, find_s=WAIT_S)
    async with stack_of(slow, limits=limits) as stack:
        slow.passes.clear()
        taken = [stack.put(key, tier_block(n)) for n, key in enumerate(KEYS)]
        assert taken == [True] * 5 + [False] * 3
        await until(lambda: stack.usage()[0].waiting_bytes > 0, "blocks are framed")
        assert stack.usage()[0].waiting_bytes <= 500_000
        slow.passes.set()
        assert await stack.flush(WAIT_S)
        usage = stack.usage()[0]
        assert usage.waiting_bytes == 0
        assert usage.stored + usage.dropped == 8
        assert 3 <= usage.dropped <= 4, "framed, they are a little longer"


async def test_a_stuck_tier_does_not_hold_the_others_up() -> None:
    slow, fast = StubbornTier(timeout_s=1000.0), HostTier(1 << 30)
    async with stack_of(slow, fast) as stack:
        slow.passes.clear()
        for n, key in enumerate(KEYS):
            assert stack.put(key, tier_block(n))
        await until(lambda: stack.usage()[1].stored == 8, "the other tier has all")
        assert not await stack.flush(0.01)
        slow.passes.set()


async def test_nothing_is_stored_twice() -> None:
    slow = StubbornTier()
    async with stack_of(slow) as stack:
        slow.passes.clear()
        for _ in range(10):
            assert stack.put(KEYS[0], tier_block(0))
        slow.passes.set()
        assert await stack.flush(WAIT_S)
        calls = slow.calls
        await fill(stack, (0,))
        assert slow.calls == calls + 1, "asked whether it is there, and no more"


async def test_a_forgotten_tenant_is_forgotten_everywhere() -> None:
    fast, slow = HostTier(1 << 30), StubbornTier()
    other = tier_key(0, "other")
    async with stack_of(fast, slow) as stack:
        await fill(stack)
        stack.put(other, tier_block(9))
        assert await stack.flush(WAIT_S)
        assert await stack.forget(KEYS[0].tenant_tag) == Forgotten(entries=8)
        assert await stack.find(KEYS) == Found()
        assert await blocks(stack, [other]) == [tier_block(9)]
        await fill(stack, (0,))
        assert await blocks(stack) == [tier_block(0)], "what comes later is kept"


async def test_what_waits_to_be_written_is_forgotten_too() -> None:
    slow = StubbornTier(timeout_s=1000.0)
    async with stack_of(slow, limits=StackLimits(writers=1, find_s=WAIT_S)) as stack:
        slow.passes.clear()
        for n, key in enumerate(KEYS):
            assert stack.put(key, tier_block(n))
        await until(lambda: stack.usage()[0].waiting_bytes > 7 * 100_000, "all are framed")
        forgetting = asyncio.create_task(stack.forget(KEYS[0].tenant_tag))
        await asyncio.sleep(0)
        assert not forgetting.done(), "one is being written: that is waited for"
        slow.passes.set()
        assert (await forgetting).unreachable == ()
        assert await stack.flush(WAIT_S)
        assert slow.usage().entries == 0


async def test_what_is_being_read_is_not_promoted_after_it_was_forgotten() -> None:
    fast, slow = HostTier(1 << 30), StubbornTier(timeout_s=1000.0)
    await slow.put(KEYS[0], Framer().framed(KEYS[0], tier_block(0)))
    async with stack_of(fast, slow) as stack:
        entry = await slow.get(KEYS[0])
        reached, goes_on = asyncio.Event(), asyncio.Event()

        async def late(key: TierKey) -> object:
            reached.set()
            await goes_on.wait()
            return entry

        slow.get = late  # type: ignore[method-assign, assignment]
        reading = asyncio.create_task(stack.read(KEYS[:1], timeout_s=WAIT_S))
        await reached.wait()
        await stack.forget(KEYS[0].tenant_tag)
        goes_on.set()
        assert await reading == []
        assert await stack.flush(WAIT_S)
        assert fast.usage().entries == 0


async def test_a_tier_out_of_reach_is_told_to_forget_later() -> None:
    fast, slow = HostTier(1 << 30), StubbornTier()
    async with stack_of(fast, slow) as stack:
        await fill(stack)
        slow.fails = TierAway("gone")
        forgotten = await stack.forget(KEYS[0].tenant_tag)
        assert forgotten == Forgotten(entries=8, unreachable=("stubborn",))
        assert stack.usage()[1].forgetting == 1
        slow.fails = None
        assert await blocks(stack) == [], "it may still have it, and gives nothing"
        await until(lambda: stack.usage()[1].forgetting == 0, "it is told again")
        assert slow.usage().entries == 0
        await fill(stack, (0,))
        assert await blocks(stack) == [tier_block(0)]


async def test_a_name_stands_for_one_tier() -> None:
    with pytest.raises(ValueError, match="expected each once"):
        TierStack([HostTier(1 << 20), HostTier(1 << 20)])


async def test_a_stack_without_tiers_has_nothing() -> None:
    async with stack_of() as stack:
        assert stack.put(KEYS[0], tier_block(0))
        assert await stack.flush(WAIT_S)
        assert await stack.find(KEYS) == Found()
        assert await blocks(stack) == []
        assert await stack.forget(KEYS[0].tenant_tag) == Forgotten()
        assert stack.usage() == ()


async def test_close_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    slow = StubbornTier(timeout_s=1000.0)
    async with stack_of(slow) as stack:
        slow.passes.clear()
        stack.put(KEYS[0], tier_block(0))
    assert asyncio.all_tasks() == before

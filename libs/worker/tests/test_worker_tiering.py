import asyncio
from collections.abc import Callable, Sequence

import pytest

from diptych_bus.memory import MemoryBroker
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import GenerateJob
from diptych_contracts.tiers import TierKey, TierUsage
from diptych_engine.port import Restored, StepReport
from diptych_kvtiers.finding import Found
from diptych_policy.prefixes import block_hashes
from diptych_policy.tiering import tier_keys
from diptych_testkit.builders import a_generation
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_worker import tiering
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.attempts import Attempt
from diptych_worker.tier_writing import TierWriting
from diptych_worker.tiering import NOTHING, Tiering, TierWork

ME = Incarnation("me")
SPEC = ToyStepEngine().spec
PROMPT = tuple(range(1, 301))
SLOT = SPEC.layout.slot_bytes


def keys(prompt: Sequence[int] = PROMPT, tenant: str = "default") -> tuple[TierKey, ...]:
    return tier_keys(tenant, SPEC.fingerprint, SPEC.layout, prompt)


class Stack:
    """Tiers that hold what they are given, and note what they are asked."""

    def __init__(self) -> None:
        self.entries: dict[TierKey, bytes] = {}
        self.finds: list[int] = []
        self.reads: list[int] = []
        self.puts: list[TierKey] = []
        self.full = False
        self.speed = 1e9
        self.on_read: Callable[[], None] = lambda: None
        self.held: asyncio.Event | None = None
        self.reading: asyncio.Event | None = None
        self.orders = 0
        self.put_orders: list[int | None] = []

    async def find(self, keys: Sequence[TierKey]) -> Found:
        self.finds.append(len(keys))
        if self.held is not None:
            await self.held.wait()
        count = 0
        while count < len(keys) and keys[count] in self.entries:
            count += 1
        return Found(count, count * SLOT, count * SLOT / self.speed, ("one",) * count)

    async def read(self, keys: Sequence[TierKey], *, timeout_s: float) -> list[bytes]:
        self.reads.append(len(keys))
        self.on_read()
        if self.reading is not None:
            await self.reading.wait()
        return [self.entries[key] for key in keys if key in self.entries]

    def put(self, key: TierKey, data: bytes, *, orders: int | None = None) -> bool:
        self.put_orders.append(orders)
        if self.full:
            return False
        self.puts.append(key)
        self.entries[key] = data
        return True

    def usage(self) -> tuple[TierUsage, ...]:
        return (TierUsage(name="one", read_bytes_per_s=self.speed),)


class Room:
    def __init__(self, **settings: object) -> None:
        self.stack = Stack()
        self.blocks = AnnouncedBlocks(MemoryBroker().connect("me"), ME)
        self.tiering = Tiering(self.stack, SPEC, self.blocks, **settings)  # type: ignore[arg-type]

    def keep(self, prompt: Sequence[int] = PROMPT, count: int | None = None) -> None:
        for key in keys(prompt)[:count]:
            self.stack.entries[key] = bytes(SLOT)

    async def work(self, prompt: Sequence[int] = PROMPT, tenant: str = "default") -> TierWork:
        job = GenerateJob(generation=a_generation(prompt_ids=tuple(prompt), tenant=tenant))
        attempt = Attempt(job=job, worker=ME, accepted_s=0.0, expires_s=60.0)
        attempt.prompt_ids = prompt
        return await self.tiering.work(attempt)

    def prefills_at(self, tokens_s: float) -> None:
        self.tiering.heard(
            StepReport(news=(), duration_s=64 / tokens_s, prefill_tokens=64, decode_tokens=0)
        )


async def test_what_is_kept_comes_as_a_run_of_blocks_and_is_not_written_again() -> None:
    room = Room()
    room.keep()
    for _ in range(3):
        work = await room.work()
        assert [(b.p0, b.p1) for b in work.restored] == [(i * 64, i * 64 + 64) for i in range(4)]
        assert all(block.data.readonly for block in work.restored)
        assert (work.tee, work.wanted) == (None, frozenset())


async def test_a_prompt_of_one_block_or_less_asks_for_nothing() -> None:
    room = Room()
    assert await room.work(PROMPT[:64]) is NOTHING
    assert room.stack.finds == []


async def test_the_last_token_is_never_restored() -> None:
    room = Room()
    room.keep(PROMPT[:128])
    assert len((await room.work(PROMPT[:128])).restored) == 1
    assert len((await room.work(PROMPT[:129])).restored) == 2


async def test_blocks_the_engine_has_are_not_asked_for() -> None:
    room = Room()
    room.keep()
    hashes = block_hashes("default", SPEC.fingerprint.base, PROMPT, 64)
    room.blocks.changed(stored=hashes[:2], removed=())
    work = await room.work()
    assert [block.p0 for block in work.restored] == [128, 192]
    await room.blocks.announce()
    room.blocks.changed(stored=(), removed=hashes[1:2])
    work = await room.work()
    assert [block.p0 for block in work.restored] == [64, 128, 192]
    assert room.stack.finds == [2, 3]


async def test_a_block_is_wanted_at_its_second_sighting_and_until_the_tiers_take_it() -> None:
    room = Room()
    first, second = await room.work(), await room.work()
    assert (first.wanted, second.wanted) == (frozenset(), frozenset(range(4)))
    room.stack.full = True
    await tee(second)
    assert (await room.work()).wanted == frozenset(range(4))
    room.stack.full = False
    await tee(await room.work())
    assert room.stack.puts == list(keys())
    assert (await room.work()).wanted == frozenset()


async def test_what_is_computed_after_a_purge_says_that_it_began_before() -> None:
    """A prompt that was being filled wrote its tenant's blocks again once they were purged."""
    room = Room()
    await room.work()
    room.stack.orders = 3
    work = await room.work()
    room.stack.orders = 4
    await tee(work)
    assert room.stack.put_orders == [3] * 4


async def test_prompts_that_read_at_once_hold_no_more_than_all_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each was given all the room there was before any of them had read."""
    monkeypatch.setattr(tiering, "_HELD_BYTES", 5 * SLOT)
    room = Room(always=True)
    room.keep()
    room.stack.held, room.stack.reading = asyncio.Event(), asyncio.Event()
    works = [asyncio.create_task(room.work()) for _ in range(3)]
    await asyncio.sleep(1)
    room.stack.held.set()
    await asyncio.sleep(1)
    assert room.stack.reads == [4, 1]
    room.stack.reading.set()
    made = await asyncio.gather(*works)
    assert [len(work.restored) for work in made] == [4, 1, 0]
    for work in made:
        work.leave()
    await asyncio.sleep(1)
    assert len((await room.work()).restored) == 4


async def tee(work: TierWork) -> None:
    """The engine writes all blocks, the tail too."""
    assert work.tee is not None
    for index in range(5):
        buffer = work.tee.buffer(index)
        buffer[:4] = index.to_bytes(4, "little")
        work.tee.written(index, SLOT)
    await asyncio.sleep(0)


async def test_what_is_written_is_a_copy() -> None:
    room = Room()
    await room.work()
    await tee(await room.work())
    firsts = [int.from_bytes(room.stack.entries[key][:4], "little") for key in keys()]
    assert firsts == [0, 1, 2, 3]


async def test_what_a_tier_has_lost_is_written_again() -> None:
    room = Room()
    await room.work()
    await tee(await room.work())
    assert (await room.work()).wanted == frozenset()
    for key in keys()[1:3]:
        del room.stack.entries[key]
    work = await room.work()
    assert len(work.restored) == 1
    assert work.wanted == {1, 2, 3}  # what is behind the gap was not looked for


async def test_a_block_that_cannot_be_read_although_it_was_found_is_written_again() -> None:
    room = Room()
    room.keep()
    room.stack.on_read = lambda: room.stack.entries.pop(keys()[3], None)  # type: ignore[assignment,return-value]
    work = await room.work()
    assert len(work.restored) == 3
    assert room.tiering.tally.late == 0
    assert (await room.work()).wanted == {3}


async def test_another_tenant_asks_for_other_blocks() -> None:
    room = Room()
    room.keep()
    assert (await room.work(tenant="other")).restored == ()


async def test_where_computing_is_faster_nothing_is_read() -> None:
    room = Room()
    room.keep()
    room.prefills_at(2000)  # 4 blocks: 128 ms
    room.stack.speed = SLOT / 0.1
    assert (await room.work()).restored == ()
    room.stack.speed = SLOT / 0.001
    assert len((await room.work()).restored) == 4
    assert room.stack.reads == [4]


async def test_an_engine_that_needs_no_time_is_not_kept_waiting_by_a_question() -> None:
    room = Room()
    room.keep()
    room.prefills_at(1e6)
    assert (await room.work()).restored == ()
    assert room.stack.finds == []


async def test_always_restores_whatever_it_costs() -> None:
    room = Room(always=True)
    room.keep()
    room.prefills_at(1e6)
    room.stack.speed = 1.0
    assert len((await room.work()).restored) == 4


async def test_tiers_that_do_not_answer_are_waited_for_as_long_as_computing_takes() -> None:
    room = Room()
    room.keep()
    room.prefills_at(10_000)  # 26 ms
    room.stack.held = asyncio.Event()
    assert (await room.work()).restored == ()
    assert room.stack.finds == [4]
    assert room.stack.reads == []


async def test_blocks_that_wait_for_the_engine_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych_worker.tiering._HELD_BYTES", 6 * SLOT)
    room = Room()
    room.keep()
    first, second, third = await room.work(), await room.work(), await room.work()
    assert [len(work.restored) for work in (first, second, third)] == [4, 2, 0]
    for _ in range(2):  # the engine says so, and the end of the attempt
        first.leave()
    await asyncio.sleep(0)
    assert first.restored == ()
    assert len((await room.work()).restored) == 4


async def test_what_the_engine_made_of_it_is_counted() -> None:
    room = Room()
    restored = Restored(sequences=1, tokens=256, n_bytes=4 * SLOT, took_s=0.01)
    room.tiering.heard(StepReport(news=(), duration_s=0.0, restored=restored))
    room.tiering.heard(StepReport(news=(), duration_s=0.0, restored=Restored(refused=1)))
    snapshot = room.tiering.snapshot(ME)
    assert (snapshot.worker, snapshot.restored, snapshot.restored_tokens) == (ME, 1, 256)
    told = [len(room.tiering.snapshot(ME, name).tiers) for name in ("", "one", "another")]
    assert told == [1, 1, 0]
    assert room.tiering.tally.refused == 1
    assert room.tiering.costs.import_s(4) == pytest.approx(0.01)
    await room.tiering.measure()


async def test_copies_under_way_are_bounded_and_what_does_not_fit_is_counted() -> None:
    taken: list[TierKey] = []
    writing = TierWriting(lambda key, _data, _orders: taken.append(key), most_bytes=250)
    for key in keys():
        writing.offer(key, memoryview(bytes(100)))
    assert (taken, writing.dropped) == ([], 2)
    await asyncio.sleep(0)
    assert taken == list(keys()[:2])
    writing.offer(keys()[2], memoryview(bytes(100)))
    await asyncio.sleep(0)
    assert (len(taken), writing.dropped) == (3, 2)

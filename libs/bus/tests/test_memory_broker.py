"""What the parity suite cannot ask of a real server: a clock of the test's own, and faults."""

import asyncio
from random import Random

import pytest

from diptych_bus.memory import Faults, MemoryBroker
from diptych_bus.memory.broker import matches
from diptych_bus.port import Delivery, Gone, JournalItem, Kept, Pulled
from diptych_contracts.errors import BusAway
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import Fence
from diptych_contracts.streams import LEASES, SCHEDULERS

GATEWAY = Incarnation("gateway-1")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def beat(count: int) -> Beat:
    return Beat(member=Incarnation("w-1"), service="s", count=count)


def fence(attempt: int) -> Fence:
    return Fence(request_id=RequestId("r"), attempt=attempt)


async def rounds(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("*.b", "a.b", True),
        ("a", "a.b", False),
        ("a.*.c", "a.b.c", True),
    ],
)
def test_wildcards(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


async def test_a_ttl_follows_the_tests_clock() -> None:
    clock = Clock()
    broker = MemoryBroker(now_s=clock)
    bucket = broker.connect("b").bucket(LEASES, Beat)
    seen: list[Kept[Beat] | Gone] = []
    await bucket.put("a", beat(1), ttl_s=10.0)
    await bucket.watch(seen.append)

    clock.now_s += 9.9
    broker.run_due()
    assert await bucket.get("a") is not None
    clock.now_s += 0.1
    broker.run_due()
    await rounds()

    assert await bucket.get("a") is None
    assert seen[-1] == Gone("a")
    broker.timers.close()


async def test_redelivery_follows_the_tests_clock_and_ends() -> None:
    clock = Clock()
    broker = MemoryBroker(now_s=clock)
    bus = broker.connect("b")
    pulled: list[Pulled] = []
    await bus.pull(SCHEDULERS, pulled.append, paused=lambda: False)
    await bus.store("request.batch.m", beat(0), msg_id="a", timeout_s=60)
    await rounds()

    for _ in range(8):
        clock.now_s += SCHEDULERS.ack_wait_s
        broker.run_due()
        await rounds()

    assert [p.num_delivered for p in pulled] == [1, 2, 3, 4, 5]
    await bus.close()
    broker.timers.close()


async def test_an_acknowledged_message_stays_done() -> None:
    clock = Clock()
    broker = MemoryBroker(now_s=clock)
    bus = broker.connect("b")
    pulled: list[Pulled] = []
    await bus.pull(SCHEDULERS, pulled.append, paused=lambda: False)
    await bus.store("request.batch.m", beat(0), msg_id="a", timeout_s=60)
    await rounds()

    await pulled[0].ack()
    await pulled[0].nak(0.0)
    clock.now_s += 100.0
    broker.run_due()
    await rounds()

    assert len(pulled) == 1
    broker.timers.close()


async def test_while_the_broker_is_away_the_ring_keeps_everything() -> None:
    broker = MemoryBroker()
    worker, gateway = broker.connect("w"), broker.connect("g")
    followed: list[JournalItem] = []
    heard: list[Delivery] = []
    await gateway.follow(GATEWAY, followed.append)
    await gateway.subscribe("beat.*", heard.append)

    broker.go_away()
    worker.append(GATEWAY, fence(1))
    worker.append(GATEWAY, fence(2))
    await worker.publish("beat.w", beat(1))
    assert not await worker.flush(0.02)
    assert not worker.connected
    with pytest.raises(BusAway):
        await worker.store("request.batch.m", beat(0), msg_id="a", timeout_s=0.02)
    broker.come_back()

    assert await worker.flush(1.0)
    await rounds()
    assert [item.entry for item in followed] == [fence(1), fence(2)]
    assert heard == []


async def test_a_killed_bus_leaves_without_a_word() -> None:
    broker = MemoryBroker()
    worker, gateway = broker.connect("w"), broker.connect("g")

    async def answer(_: Delivery) -> Beat:
        return beat(1)

    await worker.serve("job.w", answer)
    worker.append(GATEWAY, fence(1))
    await worker.kill()

    await rounds()
    assert await gateway.last_seq(GATEWAY) == 0
    assert worker.closed.done()
    with pytest.raises(BusAway):
        await gateway.request("job.w", beat(0), Beat, timeout_s=0.05)


async def heard_with(faults: Faults, count: int = 400, *, at_least: int = 0) -> list[int]:
    broker = MemoryBroker(faults=faults)
    bus = broker.connect("b")
    counts: list[int] = []
    await bus.subscribe("beat.*", lambda d: counts.append(d.decode(Beat).count))
    for n in range(count):
        await bus.publish("beat.a", beat(n))
    async with asyncio.timeout(60):
        while len(counts) < at_least:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    await rounds()  # what was due together with our waking
    await bus.close()
    return counts


async def test_dropped_messages_follow_the_seed() -> None:
    once, again = [await heard_with(Faults(Random(7), drop_frac=0.25)) for _ in range(2)]

    assert once == again
    assert 240 < len(once) < 360


async def test_duplicates_and_delays() -> None:
    doubled = await heard_with(Faults(Random(7), duplicate_frac=0.5), at_least=400)
    late = Faults(Random(7), delay_frac=0.5, delay_s=0.02)
    reordered = await heard_with(late, at_least=400)

    assert set(doubled) == set(range(400))
    assert len(doubled) > 500
    assert sorted(reordered) == list(range(400))
    assert reordered != sorted(reordered)


async def test_faults_affect_only_what_they_name() -> None:
    faults = Faults(Random(7), drop_frac=1.0, affects=lambda subject: subject != "beat.a")

    assert len(await heard_with(faults, 10)) == 10


async def test_lost_acks_store_again_and_lose_nothing() -> None:
    clock = Clock()
    broker = MemoryBroker(now_s=clock, faults=Faults(Random(3), lost_ack_frac=0.3))
    bus = broker.connect("b")
    for attempt in range(1, 31):
        bus.append(GATEWAY, fence(attempt))
    await rounds()

    for _ in range(200):
        clock.now_s += 0.5
        broker.run_due()
        await rounds(3)

    assert await bus.flush(0.1)
    stored = [item.entry async for item in bus.read(GATEWAY, after_seq=0)]
    assert list(dict.fromkeys(stored)) == [fence(n) for n in range(1, 31)]
    assert len(stored) > 30
    broker.timers.close()


async def test_a_lost_ack_of_a_store_is_unknown_and_its_retry_a_duplicate() -> None:
    lossy = Faults(Random(1), lost_ack_frac=1.0, affects=lambda subject: "lossy" in subject)
    bus = MemoryBroker(faults=lossy).connect("b")

    for _ in range(2):
        with pytest.raises(BusAway):
            await bus.store("event.lossy", beat(0), msg_id="a", timeout_s=60)

    assert await bus.stored("EVENTS", 1) is not None
    assert await bus.stored("EVENTS", 2) is None


async def test_who_is_cut_off_hears_what_it_missed_of_what_is_stored() -> None:
    broker = MemoryBroker()
    worker, gateway = broker.connect("w"), broker.connect("g")
    followed: list[JournalItem] = []
    heard: list[Delivery] = []
    await gateway.follow(GATEWAY, followed.append)
    await gateway.subscribe("beat.*", heard.append)

    gateway.line.cut()
    worker.append(GATEWAY, fence(1))
    await worker.publish("beat.w", beat(1))
    await gateway.publish("beat.g", beat(1))
    await rounds()
    with pytest.raises(BusAway):
        await gateway.store("request.batch.m", beat(0), msg_id="a", timeout_s=0.02)
    assert (followed, heard) == ([], [])
    assert gateway.connected
    gateway.line.heal()
    worker.append(GATEWAY, fence(2))
    await rounds()

    assert [item.entry for item in followed] == [fence(1), fence(2)]
    assert heard == []


async def test_a_watch_that_was_cut_off_lists_again() -> None:
    broker = MemoryBroker()
    watcher, writer = broker.connect("w"), broker.connect("x").bucket(LEASES, Beat)
    await writer.put("a", beat(1))
    await writer.put("b", beat(1))
    seen: list[Kept[Beat] | Gone] = []
    await watcher.bucket(LEASES, Beat).watch(seen.append)

    watcher.line.cut()
    await writer.delete("a")
    await writer.put("b", beat(2))
    await rounds()
    assert len(seen) == 2
    watcher.line.heal()
    await rounds()

    assert seen[2:] == [Gone("a"), Kept("b", beat(2), 4)]


async def test_a_puller_that_takes_nothing_in_is_sent_one_batch() -> None:
    broker = MemoryBroker()
    bus, other = broker.connect("frozen"), broker.connect("b")
    pulled: list[Pulled] = []
    bus.line.soon = lambda *_: None  # type: ignore[method-assign]
    await bus.pull(SCHEDULERS, pulled.append, paused=lambda: False)
    for number in range(2 * SCHEDULERS.batch):
        await other.store("request.batch.m", beat(0), msg_id=str(number), timeout_s=60)
    await other.pull(SCHEDULERS, pulled.append, paused=lambda: False)
    await rounds(40)

    assert [p.seq for p in pulled] == list(range(SCHEDULERS.batch + 1, 2 * SCHEDULERS.batch + 1))
    await bus.kill()
    await other.close()
    broker.timers.close()

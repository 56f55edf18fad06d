"""The server is killed or frozen under its clients: everything heals, nothing acked is lost."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diptych_bus.jetstream import JetStreamBus, buckets
from diptych_bus.jetstream.watching import Watch
from diptych_bus.port import Gone, JournalItem, Kept, Pulled
from diptych_contracts.errors import BusAway, Conflict
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import Fence, TokenEntry, TokenFrame
from diptych_contracts.streams import LEASES, SCHEDULERS
from diptych_contracts.wire import encode
from diptych_identity.roles import Role
from diptych_policy.journal import RequestView, parts
from diptych_testkit.guarded_nats import GuardedNats, guarded_nats

pytestmark = pytest.mark.live

GATEWAY = Incarnation("gateway-1")
FAR_S = 60.0
"""What heals does so in about 1 s at rest; what does not hangs for longer than this."""
EXPIRES_S = 10.0
"""Long enough to be seen first."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts on a busy machine may be away for longer than a call usually waits."""
    monkeypatch.setattr(buckets, "CALL_S", FAR_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GuardedNats]:
    with guarded_nats(tmp_path / "bus", unbound=Role.SUPERVISOR) as running:
        yield running


async def join(server: GuardedNats, name: str) -> JetStreamBus:
    return await server.join(Role.SUPERVISOR, name)


@asynccontextmanager
async def buses(server: GuardedNats, count: int) -> AsyncIterator[list[JetStreamBus]]:
    opened = [await join(server, f"b{n}") for n in range(count)]
    try:
        yield opened
    finally:
        for bus in opened:
            await bus.close()


async def eventually(condition: Callable[[], bool], timeout_s: float = FAR_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def restart(server: GuardedNats, away_s: float = 0.3) -> None:
    await server.server.kill()
    await asyncio.sleep(away_s)
    await server.server.start()


def beat(count: int) -> Beat:
    return Beat(member=Incarnation("w-1"), service="s", count=count)


def frame(worker: str, index: int) -> TokenFrame:
    entry = TokenEntry(request_id=RequestId(worker), attempt=1, index=index, token_ids=(index,))
    return TokenFrame(worker=Incarnation(worker), entries=(entry,))


class Writer:
    """A worker that appends a token every few ms until told to stop."""

    def __init__(self, bus: JetStreamBus, name: str) -> None:
        self.bus = bus
        self.name = name
        self.count = 0
        self.stop = asyncio.Event()

    async def run(self) -> None:
        while not self.stop.is_set():
            if not self.bus.ring_full:
                self.bus.append(GATEWAY, frame(self.name, self.count))
                self.count += 1
            await asyncio.sleep(0.003)


def answers(items: list[JournalItem], names: list[str]) -> dict[str, list[int]]:
    views = {RequestId(name): RequestView(RequestId(name)) for name in names}
    for item in items:
        for part in parts(item.entry):
            views[part.request_id].apply(part)
    return {str(request): view.token_ids for request, view in views.items()}


async def disturb_and_check(
    server: GuardedNats, disturb: Callable[[], "asyncio.Future[None]"]
) -> None:
    async with buses(server, 3) as (gateway, *workers):
        followed: list[JournalItem] = []
        await gateway.follow(GATEWAY, followed.append)
        writers = [Writer(bus, f"w{n}") for n, bus in enumerate(workers)]
        async with asyncio.TaskGroup() as group:
            for writer in writers:
                group.create_task(writer.run())
            await eventually(lambda: len(followed) > 100)
            await disturb()
            known = len(followed)
            await eventually(lambda: len(followed) > known)
            await asyncio.sleep(0.5)
            for writer in writers:
                writer.stop.set()
        assert all([await bus.flush(FAR_S) for bus in workers])
        last = await gateway.last_seq(GATEWAY)
        await eventually(lambda: followed[-1].seq == last, FAR_S)

        read = [item async for item in gateway.read(GATEWAY, after_seq=0)]
        assert followed == read
        expected = {writer.name: list(range(writer.count)) for writer in writers}
        assert answers(followed, list(expected)) == expected


async def test_the_journal_survives_kills(server: GuardedNats) -> None:
    async def disturb() -> None:
        for _ in range(3):
            await restart(server)
            await asyncio.sleep(0.5)

    await disturb_and_check(server, lambda: asyncio.ensure_future(disturb()))


async def test_the_journal_survives_a_freeze(server: GuardedNats) -> None:
    async def disturb() -> None:
        server.server.freeze()
        await asyncio.sleep(3.5)
        server.server.thaw()

    await disturb_and_check(server, lambda: asyncio.ensure_future(disturb()))


async def test_a_short_freeze_needs_no_reconnect(server: GuardedNats) -> None:
    async def disturb() -> None:
        server.server.freeze()
        await asyncio.sleep(1.0)
        server.server.thaw()

    await disturb_and_check(server, lambda: asyncio.ensure_future(disturb()))


async def test_the_ring_fills_while_the_server_is_away_and_empties_in_order(
    server: GuardedNats,
) -> None:
    async with buses(server, 2) as (gateway, worker):
        followed: list[JournalItem] = []
        await gateway.follow(GATEWAY, followed.append)
        await server.server.kill()
        await eventually(lambda: not worker.connected, FAR_S)

        count = 0
        while not worker.ring_full:
            worker.append(GATEWAY, frame("w0", count))
            count += 1
        assert not await worker.flush(0.05)
        await server.server.start()

        assert await worker.flush(FAR_S)
        await eventually(lambda: len(followed) >= count, FAR_S)
        tokens = [item.entry.entries[0].index for item in followed]  # type: ignore[union-attr]
        assert tokens == list(range(count))


async def test_acknowledged_records_survive_kills(server: GuardedNats) -> None:
    async with buses(server, 1) as (bus,):
        acknowledged: list[tuple[int, int]] = []
        stop = asyncio.Event()

        async def record() -> None:
            attempt = 0
            while not stop.is_set():
                attempt += 1
                entry = Fence(request_id=RequestId("r"), attempt=attempt)
                acknowledged.append((await bus.record(GATEWAY, entry, timeout_s=FAR_S), attempt))

        async with asyncio.TaskGroup() as group:
            group.create_task(record())
            for _ in range(4):
                await asyncio.sleep(0.2)
                await restart(server, away_s=0.1)
            await asyncio.sleep(0.2)
            stop.set()

        stored = [
            (item.seq, item.entry.attempt)  # type: ignore[union-attr]
            async for item in bus.read(GATEWAY, after_seq=0)
        ]
        assert set(acknowledged) <= set(stored)
        assert list(dict.fromkeys(attempt for _, attempt in stored)) == [
            attempt for _, attempt in acknowledged
        ]


async def unacked(bus: JetStreamBus) -> int:
    """How many messages the schedulers have been sent and not acknowledged."""
    subject = f"$JS.API.CONSUMER.INFO.{SCHEDULERS.stream}.{SCHEDULERS.name}"
    info = await bus._connection.client.request(subject, b"", timeout=FAR_S)
    return int(json.loads(info.data)["num_ack_pending"])


async def test_a_pull_goes_on_after_a_kill(server: GuardedNats) -> None:
    """A killed server forgets acks it had not written yet: those messages come again."""
    async with buses(server, 2) as (gateway, scheduler):
        taken: list[int] = []
        acks: set[asyncio.Task[None]] = set()

        def take(pulled: Pulled) -> None:
            taken.append(pulled.delivery.decode(Beat).count)
            acks.add(asyncio.ensure_future(pulled.ack()))

        await scheduler.pull(SCHEDULERS, take, paused=lambda: False)
        for n in range(3):
            await gateway.store("request.batch.m", beat(n), msg_id=f"r{n}", timeout_s=FAR_S)
        await eventually(lambda: len(taken) == 3, FAR_S)
        await restart(server)
        for n in range(3, 6):
            await gateway.store("request.batch.m", beat(n), msg_id=f"r{n}", timeout_s=FAR_S)

        await eventually(lambda: set(taken) == set(range(6)))
        while await unacked(gateway):
            await asyncio.sleep(0.1)
        await asyncio.gather(*acks)
        known = len(taken)
        await asyncio.sleep(2.5)
        assert list(dict.fromkeys(taken)) == list(range(6))
        assert len(taken) == known, "what is acked does not come again"


async def test_a_pull_goes_on_after_a_freeze(server: GuardedNats) -> None:
    async with buses(server, 2) as (gateway, scheduler):
        taken: list[int] = []
        acks: set[asyncio.Task[None]] = set()

        def take(pulled: Pulled) -> None:
            taken.append(pulled.delivery.decode(Beat).count)
            acks.add(asyncio.ensure_future(pulled.ack()))

        await scheduler.pull(SCHEDULERS, take, paused=lambda: False)
        server.server.freeze()
        await eventually(lambda: not scheduler.connected)
        server.server.thaw()
        await gateway.store("request.batch.m", beat(0), msg_id="r0", timeout_s=FAR_S)

        await eventually(lambda: bool(taken))


async def test_a_watch_heals_after_a_kill(server: GuardedNats) -> None:
    async with buses(server, 2) as (here, there):
        state: dict[str, int] = {}

        def note(change: Kept[Beat] | Gone) -> None:
            if isinstance(change, Gone):
                state.pop(change.key, None)
            else:
                state[change.key] = change.value.count

        written = there.bucket(LEASES, Beat)
        revision = await written.create("a", beat(1))
        await written.put("b", beat(1))
        await written.put("expires", beat(1), ttl_s=EXPIRES_S)
        await here.bucket(LEASES, Beat).watch(note)
        assert state == {"a": 1, "b": 1, "expires": 1}

        await restart(server, away_s=EXPIRES_S + 0.5)
        await written.update("a", beat(2), revision)
        await written.delete("b")
        await written.create("c", beat(1))

        await eventually(lambda: state == {"a": 2, "c": 1})
        await written.put("d", beat(1))
        await eventually(lambda: "d" in state)


async def test_a_watch_that_forgets_final_values_goes_on_where_it_was(server: GuardedNats) -> None:
    async with buses(server, 2) as (here, there):
        told: list[tuple[str, int | None]] = []

        def note(change: Kept[Beat] | Gone) -> None:
            told.append((change.key, change.value.count if isinstance(change, Kept) else None))

        written = there.bucket(LEASES, Beat)
        for key in ("x", "y", "z"):
            await written.put(key, beat(9))
        await written.put("live", beat(1))
        await here.bucket(LEASES, Beat).watch(note, final=lambda value: value.count == 9)
        assert len(told) == 4

        await restart(server)
        await written.put("live", beat(9))
        await written.put("new", beat(1))
        await eventually(lambda: ("new", 1) in told, FAR_S)
        assert told[4:] == [("live", 9), ("new", 1)], "what was final is not told again"


async def test_a_watch_lists_very_many_final_values_and_keeps_none(server: GuardedNats) -> None:
    """A scheduler's start beside 15 minutes of closed records: the listing never ended before."""
    async with buses(server, 2) as (here, there):
        client = there._connection.client
        for number in range(100_000):
            await client.publish(f"$KV.leases.k{number}", encode(beat(9)))
            if number % 2_000 == 0:
                await client.flush(60)
        await client.flush(60)
        last = await client.request("$KV.leases.last", encode(beat(9)), timeout=FAR_S)
        assert json.loads(last.data)["seq"], "so all that came before is stored or dropped"
        info = await client.request("$JS.API.STREAM.INFO.KV_leases", b"", timeout=FAR_S)
        stored = json.loads(info.data)["state"]["messages"]
        assert stored > 50_000, "sent without waiting for acknowledgements: some may be dropped"
        keys: set[str] = set()
        bucket = here.bucket(LEASES, Beat)
        watch = await bucket.watch(lambda c: keys.add(c.key), final=lambda value: value.count == 9)
        assert len(keys) == stored
        assert isinstance(watch, Watch)
        assert (watch._revisions, watch._expiries) == ({}, {})


async def test_calls_wait_for_the_server_within_their_deadline(server: GuardedNats) -> None:
    async with buses(server, 1) as (bus,):
        bucket = bus.bucket(LEASES, Beat)
        revision = await bucket.create("a", beat(1))
        await server.server.kill()
        await eventually(lambda: not bus.connected, FAR_S)

        with pytest.raises(BusAway):
            await bus.store("request.batch.m", beat(0), msg_id="r0", timeout_s=0.3)
        with pytest.raises(BusAway):
            await bus.request("job.w", beat(0), Beat, timeout_s=0.3)
        await bus.publish("load.w", beat(0))
        stored = asyncio.ensure_future(
            bus.store("request.batch.m", beat(0), msg_id="r0", timeout_s=FAR_S)
        )
        updated = asyncio.ensure_future(bucket.update("a", beat(2), revision))
        await server.server.start()

        assert (await stored).seq == 1
        assert await updated > revision
        with pytest.raises(Conflict):
            await bucket.update("a", beat(3), revision)
        assert (await bus.store("request.batch.m", beat(0), msg_id="r0", timeout_s=FAR_S)).duplicate


async def test_close_does_not_wait_for_a_server_that_is_away(server: GuardedNats) -> None:
    async with buses(server, 1) as (bus,):
        await bus.follow(GATEWAY, lambda _: None)
        await bus.bucket(LEASES, Beat).watch(lambda _: None)
        await bus.pull(SCHEDULERS, lambda _: None, paused=lambda: False)
        await server.server.kill()
        await eventually(lambda: not bus.connected, FAR_S)
        bus.append(GATEWAY, frame("w0", 0))

        async with asyncio.timeout(FAR_S):
            await bus.close()

        assert await bus.closed is None


async def test_five_services_may_start_at_once(server: GuardedNats) -> None:
    opened = await asyncio.gather(*(join(server, f"s{n}") for n in range(5)))

    for bus in opened:
        assert bus.connected
        await bus.close()

"""One suite, two buses: what the port promises, both adapters do."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    get_current_span,
    set_span_in_context,
    use_span,
)

from diptych_bus.access import Access
from diptych_bus.advisories import Undelivered, undelivered
from diptych_bus.jetstream import JetStreamBus
from diptych_bus.jetstream.answers import api
from diptych_bus.jetstream.client import IdentifiedClient
from diptych_bus.memory import MemoryBroker
from diptych_bus.port import Bus, Delivery, Gone, JournalItem, Kept, Pulled
from diptych_bus.server import NatsServer
from diptych_contracts import subjects
from diptych_contracts.dead import DeadLetter
from diptych_contracts.errors import BusAway, Conflict, Permanent, StoreFull
from diptych_contracts.events import MemberJoined
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import Fence, TokenEntry, TokenFrame
from diptych_contracts.streams import (
    CONFIG,
    LEASES,
    MODELS,
    PROMPTS,
    SCHEDULERS,
    STREAMS,
    UNDELIVERED,
    UNDELIVERED_SCHEDULERS,
    BucketSpec,
    ConsumerSpec,
    Discard,
    StreamSpec,
)
from diptych_identity.roles import Role
from diptych_testkit.guarded_nats import GuardedNats, guarded_nats
from diptych_testkit.nats import running_nats

GATEWAY = Incarnation("gateway-1")
OTHER = Incarnation("gateway-2")
TINY_NEW = StreamSpec(
    name="TINY_NEW",
    subjects=("tiny.new.*",),
    max_age_s=60,
    max_bytes=4096,
    discard=Discard.NEW,
    dedupe_s=1,
)
TINY_OLD = dataclasses.replace(
    TINY_NEW, name="TINY_OLD", subjects=("tiny.old.*",), discard=Discard.OLD
)
TINY_BUCKET = BucketSpec(name="tiny", max_bytes=4096)
TINY_KV = dataclasses.replace(TINY_NEW, name="KV_tiny", subjects=("$KV.tiny.>",))
"""What stands behind that bucket, at a server."""
ALL_STREAMS = (*STREAMS, TINY_NEW, TINY_OLD, TINY_KV)
CONSUMER = ConsumerSpec(
    stream="REQUESTS", name="test", ack_wait_s=0.5, max_deliver=2, max_ack_pending=100, batch=4
)


class Connect(Protocol):
    def __call__(self, name: str = "test") -> Awaitable[Bus]: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with running_nats(Path(tmp_path_factory.mktemp("nats"))) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedNats]:
    """A server with TLS and identities; its supervisors may do everything."""
    with guarded_nats(tmp_path_factory.mktemp("guarded"), unbound=Role.SUPERVISOR) as running:
        yield running


async def wipe(url: str, access: Access | None = None) -> None:
    client = IdentifiedClient(access)
    await client.connect_as(url)
    js = client.jetstream(timeout=60)
    for info in await js.streams_info():
        await js.delete_stream(str(info.config.name))
    await client.close()


@pytest.fixture(params=["memory", "jetstream", "guarded"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    buses: list[Bus] = []
    if request.param == "memory":
        broker = MemoryBroker(streams=ALL_STREAMS)
    elif request.param == "jetstream":
        url = request.getfixturevalue("server").url
        await wipe(url)
    else:
        guarded = request.getfixturevalue("guarded")
        url = guarded.url
        await wipe(url, guarded.access(Role.SUPERVISOR))

    async def connected(name: str = "test") -> Bus:
        bus: Bus
        if request.param == "memory":
            bus = broker.connect(name)
        else:
            access = None
            if request.param == "guarded":
                access = request.getfixturevalue("guarded").access(Role.SUPERVISOR)
            bus = await JetStreamBus.connect(
                url, name=name, wait_s=60.0, streams=ALL_STREAMS, access=access
            )
        buses.append(bus)
        return bus

    yield connected
    for bus in buses:
        await bus.close()


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def settle() -> None:
    """Long enough for what must not happen."""
    await asyncio.sleep(0.1)


def beat(count: int = 0, detail: str = "") -> Beat:
    return Beat(member=Incarnation("w-1"), service="decode-worker", count=count, detail=detail)


def lease(count: int) -> Beat:
    return beat(count)


def fence(attempt: int, request: str = "r") -> Fence:
    return Fence(request_id=RequestId(request), attempt=attempt)


def frame(worker: str, index: int) -> TokenFrame:
    entry = TokenEntry(request_id=RequestId(worker), attempt=1, index=index, token_ids=(index,))
    return TokenFrame(worker=Incarnation(worker), entries=(entry,))


async def echo(delivery: Delivery) -> Beat:
    asked: Beat = delivery.decode(Beat)
    return beat(asked.count + 1)


# Core messages.


async def test_subscribers_hear_their_wildcards(connect: Connect) -> None:
    here, there = await connect(), await connect()
    one: list[str] = []
    rest: list[str] = []
    await here.subscribe("beat.*", lambda d: one.append(d.subject))
    await here.subscribe("beat.>", lambda d: rest.append(d.subject))

    for subject in ("beat.a", "beat.a.b", "load.a", "beat.b"):
        await there.publish(subject, beat())

    await eventually(lambda: len(rest) == 3)
    assert rest == ["beat.a", "beat.a.b", "beat.b"]
    assert one == ["beat.a", "beat.b"]


async def test_messages_arrive_in_order_and_decoded(connect: Connect) -> None:
    here, there = await connect(), await connect()
    counts: list[int] = []
    await here.subscribe("beat.*", lambda d: counts.append(d.decode(Beat).count))

    for count in range(200):
        await there.publish("beat.a", beat(count))

    await eventually(lambda: len(counts) == 200)
    assert counts == list(range(200))


async def test_a_closed_subscription_hears_nothing(connect: Connect) -> None:
    here, there = await connect(), await connect()
    heard: list[Delivery] = []
    subscription = await here.subscribe("beat.*", heard.append)

    await subscription.close()
    await there.publish("beat.a", beat())

    await settle()
    assert heard == []


async def test_a_request_is_answered(connect: Connect) -> None:
    here, there = await connect(), await connect()
    await here.serve(subjects.job(Incarnation("w-1")), echo)

    answers = await asyncio.gather(
        *(there.request("job.w-1", beat(n), Beat, timeout_s=60) for n in range(20))
    )

    assert [answer.count for answer in answers] == list(range(1, 21))


async def test_a_request_to_nobody_fails_at_once(connect: Connect) -> None:
    bus = await connect()
    start_s = time.monotonic()

    with pytest.raises(BusAway, match=r"job\.nobody"):
        await bus.request("job.nobody", beat(), Beat, timeout_s=60.0)

    assert time.monotonic() - start_s < 30.0


async def test_a_request_without_an_answer_times_out(connect: Connect) -> None:
    here, there = await connect(), await connect()

    async def refuse(_: Delivery) -> Beat:
        raise Permanent("no")

    await here.serve("job.w-1", refuse)

    with pytest.raises(BusAway):
        await there.request("job.w-1", beat(), Beat, timeout_s=0.2)


async def test_an_answer_of_another_type_is_refused(connect: Connect) -> None:
    here, there = await connect(), await connect()
    await here.serve("job.w-1", echo)

    with pytest.raises(Permanent):
        await there.request("job.w-1", beat(), Fence, timeout_s=60)


async def test_a_stopped_server_answers_nobody(connect: Connect) -> None:
    here, there = await connect(), await connect()
    serving = await here.serve("job.w-1", echo)

    await serving.close()

    with pytest.raises(BusAway):
        await there.request("job.w-1", beat(), Beat, timeout_s=0.5)


async def test_oversize_is_refused_before_sending(connect: Connect) -> None:
    bus = await connect()
    huge = beat(detail="x" * 3_900_001)
    huge_entry = fence(1, request="x" * 3_900_001)

    with pytest.raises(Permanent, match="3900000"):
        await bus.publish("beat.a", huge)
    with pytest.raises(Permanent):
        await bus.request("job.a", huge, Beat, timeout_s=60)
    with pytest.raises(Permanent):
        await bus.store("event.a", huge, msg_id="1", timeout_s=60)
    with pytest.raises(Permanent):
        bus.append(GATEWAY, huge_entry)
    with pytest.raises(Permanent):
        await bus.record(GATEWAY, huge_entry, timeout_s=60)
    with pytest.raises(Permanent):
        await bus.bucket(LEASES, Beat).put("a", huge)


async def test_just_below_the_limit_passes(connect: Connect) -> None:
    here, there = await connect(), await connect()
    heard: list[Delivery] = []
    await here.subscribe("beat.*", heard.append)

    await there.publish("beat.a", beat(detail="x" * 3_899_000))

    await eventually(lambda: bool(heard))
    assert heard[0].decode(Beat) == beat(detail="x" * 3_899_000)


async def test_a_malformed_message_is_skipped_and_a_bug_ends_the_bus(connect: Connect) -> None:
    here, there = await connect(), await connect()
    heard: list[Any] = []
    await here.subscribe("beat.*", lambda d: heard.append(d.decode(Beat)))

    await there.publish("beat.a", fence(1))
    await there.publish("beat.a", beat(1))

    await eventually(lambda: len(heard) == 1)
    assert not here.closed.done()

    def bug(_: Delivery) -> None:
        raise KeyError("bug")

    await here.subscribe("load.*", bug)
    await there.publish("load.a", beat())

    assert isinstance(await asyncio.wait_for(here.closed, 60), KeyError)


async def test_close_completes_closed(connect: Connect) -> None:
    bus = await connect()
    assert bus.connected

    await bus.close()

    assert await asyncio.wait_for(bus.closed, 60) is None


# Trace context.


def span_context(trace_id: int) -> Context:
    identity = SpanContext(trace_id, 0xABC, is_remote=False, trace_flags=TraceFlags(1))
    return set_span_in_context(NonRecordingSpan(identity))


def trace_id(context: Context | None) -> int:
    return get_current_span(context).get_span_context().trace_id if context else 0


async def test_trace_context_travels_with_requests(connect: Connect) -> None:
    here, there = await connect(), await connect()
    seen: list[int] = []

    async def answer(_: Delivery) -> Beat:
        seen.append(get_current_span().get_span_context().trace_id)
        return beat()

    await here.serve("job.w-1", answer)

    with use_span(get_current_span(span_context(0x1234)), end_on_exit=False):
        await there.request("job.w-1", beat(), Beat, timeout_s=60)
    await there.request("job.w-1", beat(), Beat, timeout_s=60)

    assert seen == [0x1234, 0]
    assert trace.get_current_span().get_span_context().trace_id == 0


async def test_trace_context_travels_with_messages_but_not_with_frames(connect: Connect) -> None:
    here, there = await connect(), await connect()
    heard: list[Delivery] = []
    pulled: list[Pulled] = []
    await here.subscribe("beat.*", heard.append)
    await here.subscribe(subjects.live(GATEWAY), heard.append)
    await here.pull(CONSUMER, pulled.append, paused=lambda: False)

    with use_span(get_current_span(span_context(0x77)), end_on_exit=False):
        await there.publish("beat.a", beat())
        done = await there.store("request.batch.m", beat(), msg_id="1", timeout_s=60)
        there.append(GATEWAY, fence(1))
        assert await there.flush(60.0)

    await eventually(lambda: len(heard) == 2 and len(pulled) == 1)
    contexts = {d.subject.split(".")[0]: d.context for d in heard}
    kept = await here.stored("REQUESTS", done.seq)
    assert trace_id(contexts["beat"]) == 0x77
    assert contexts["live"] is None
    assert trace_id(pulled[0].delivery.context) == 0x77
    assert kept is not None
    assert trace_id(kept.context) == 0x77


# Streams.


async def test_the_same_id_is_stored_once(connect: Connect) -> None:
    bus = await connect()

    first = await bus.store("request.batch.m", beat(1), msg_id="a", timeout_s=60)
    again = await bus.store("request.batch.m", beat(1), msg_id="a", timeout_s=60)
    other = await bus.store("request.batch.m", beat(2), msg_id="b", timeout_s=60)

    assert (again.seq, again.duplicate) == (first.seq, True)
    assert (other.seq, other.duplicate) == (first.seq + 1, False)


async def test_an_id_may_be_used_again_after_the_window(connect: Connect) -> None:
    bus = await connect()
    first = await bus.store("tiny.new.a", beat(), msg_id="a", timeout_s=60)

    async with asyncio.timeout(60):
        while (again := await bus.store("tiny.new.a", beat(), msg_id="a", timeout_s=60)).duplicate:
            await asyncio.sleep(0.1)

    assert again.seq > first.seq
    assert not again.duplicate


async def test_stored_and_erase(connect: Connect) -> None:
    bus = await connect()
    done = await bus.store("event.joined", MemberJoined(member=GATEWAY), msg_id="a", timeout_s=60)

    found = await bus.stored("EVENTS", done.seq)
    assert found is not None
    assert found.subject == "event.joined"
    assert found.decode(MemberJoined).member == GATEWAY

    await bus.erase("EVENTS", done.seq)
    await bus.erase("EVENTS", done.seq)
    await bus.erase("EVENTS", 999)
    assert await bus.stored("EVENTS", done.seq) is None
    assert await bus.stored("EVENTS", 999) is None


async def test_headers_are_kept_with_a_message(connect: Connect) -> None:
    bus = await connect()
    more = {"Diptych-Gateway": "gateway-1"}
    done = await bus.store("event.a", beat(), msg_id="a", timeout_s=60, headers=more)

    found = await bus.stored("EVENTS", done.seq)
    assert found is not None
    assert found.headers["Diptych-Gateway"] == "gateway-1"
    assert found.headers["Nats-Msg-Id"] == "a"


async def test_a_stream_is_read_from_its_start(connect: Connect) -> None:
    bus = await connect()
    for n in range(6):
        await bus.store(f"event.{'ab'[n % 2]}.x", beat(n), msg_id=f"{n}", timeout_s=60)
    await bus.erase("EVENTS", 3)

    async def counts(subject: str, after_seq: int = 0) -> list[tuple[int, int]]:
        found = bus.all_stored("EVENTS", subject=subject, after_seq=after_seq)
        return [(item.seq, item.delivery.decode(Beat).count) async for item in found]

    assert await counts("event.>") == [(1, 0), (2, 1), (4, 3), (5, 4), (6, 5)]
    assert await counts("event.*.x", after_seq=4) == [(5, 4), (6, 5)]
    assert await counts("event.a.x") == [(1, 0), (5, 4)]
    assert await counts("event.c") == []
    found = [item.delivery async for item in bus.all_stored("EVENTS", subject="event.b.x")]
    assert [(d.subject, d.headers["Nats-Msg-Id"]) for d in found[:1]] == [("event.b.x", "1")]
    stamps = [item.stored_unix_ms async for item in bus.all_stored("EVENTS", subject="event.>")]
    assert stamps == sorted(stamps)
    assert abs(stamps[-1] - bus.unix_ms()) < 60_000


async def test_a_stream_longer_than_a_batch_is_read_whole(connect: Connect) -> None:
    bus = await connect()
    await asyncio.gather(
        *(bus.store(f"event.{n % 3}", beat(n), msg_id=f"{n}", timeout_s=60.0) for n in range(1200))
    )

    seqs = [item.seq async for item in bus.all_stored("EVENTS", subject="event.>")]

    assert seqs == list(range(1, 1201))


async def test_a_full_stream_refuses_the_new(connect: Connect) -> None:
    bus = await connect()
    payload = DeadLetter(subject="s", reason="r", payload=b"x" * 1500)
    for n in range(2):
        await bus.store("tiny.new.a", payload, msg_id=str(n), timeout_s=60)

    with pytest.raises(StoreFull, match="maximum bytes"):
        await bus.store("tiny.new.a", payload, msg_id="3", timeout_s=60)

    again = await bus.store("tiny.new.a", payload, msg_id="0", timeout_s=60)
    assert (again.seq, again.duplicate) == (1, True), "what is stored is known, full or not"


async def test_a_full_bucket_refuses_new_keys_and_rewrites(connect: Connect) -> None:
    bucket = (await connect()).bucket(TINY_BUCKET, DeadLetter)
    value = DeadLetter(subject="s", reason="r", payload=b"x" * 1500)
    revision = await bucket.create("a", value)
    await bucket.create("b", value)

    with pytest.raises(StoreFull, match="maximum bytes"):
        await bucket.create("c", value)
    with pytest.raises(StoreFull, match="maximum bytes"):
        await bucket.update("a", value, revision)
    with pytest.raises(Conflict):
        await bucket.update("a", value, revision + 1)


async def test_a_full_stream_drops_the_old(connect: Connect) -> None:
    bus = await connect()
    payload = DeadLetter(subject="s", reason="r", payload=b"x" * 1500)

    for n in range(4):
        await bus.store("tiny.old.a", payload, msg_id=str(n), timeout_s=60)

    kept = [await bus.stored("TINY_OLD", seq) is not None for seq in (1, 2, 3, 4)]
    assert kept == [False, False, True, True]


async def store_requests(bus: Bus, count: int, start: int = 0) -> None:
    for n in range(start, start + count):
        await bus.store("request.batch.m", beat(n), msg_id=f"r{n}", timeout_s=60)


async def test_replicas_share_a_consumer(connect: Connect) -> None:
    one, two = await connect("one"), await connect("two")
    taken: list[tuple[str, int]] = []
    acks: list[asyncio.Task[None]] = []

    def take(name: str) -> Callable[[Pulled], None]:
        def handler(pulled: Pulled) -> None:
            taken.append((name, pulled.delivery.decode(Beat).count))
            acks.append(asyncio.ensure_future(pulled.ack()))

        return handler

    patient = dataclasses.replace(CONSUMER, ack_wait_s=30.0)
    await store_requests(one, 5)
    await one.pull(patient, take("one"), paused=lambda: False)
    await two.pull(patient, take("two"), paused=lambda: False)
    await store_requests(one, 35, start=5)

    await eventually(lambda: len(taken) >= 40)
    await asyncio.gather(*acks)
    await settle()
    assert sorted(count for _, count in taken) == list(range(40))
    assert {name for name, _ in taken} == {"one", "two"}


async def test_what_is_not_acknowledged_comes_again_until_the_limit(connect: Connect) -> None:
    bus = await connect()
    pulled: list[Pulled] = []
    await bus.pull(CONSUMER, pulled.append, paused=lambda: False)
    await store_requests(bus, 1)

    await eventually(lambda: len(pulled) == 2)
    await asyncio.sleep(0.8)

    assert [p.num_delivered for p in pulled] == [1, 2]
    assert pulled[0].stored_unix_ms == pulled[1].stored_unix_ms
    assert pulled[0].seq == pulled[1].seq


async def test_what_is_given_up_is_said_once_and_kept_for_whoever_comes(connect: Connect) -> None:
    """The server says it once, to whoever listens at that moment: a stream must hold it."""
    bus = await connect()
    spec = dataclasses.replace(SCHEDULERS, ack_wait_s=0.3, max_deliver=2)
    pulled: list[Pulled] = []
    pulling = await bus.pull(spec, pulled.append, paused=lambda: False)
    await store_requests(bus, 1)
    await eventually(lambda: len(pulled) == 2)
    async with asyncio.timeout(60):
        while await bus.stored(UNDELIVERED.name, 1) is None:
            await asyncio.sleep(0.02)
    await pulling.close()

    later = await connect("later")
    said: list[Pulled] = []
    await later.pull(UNDELIVERED_SCHEDULERS, said.append, paused=lambda: False)
    await eventually(lambda: len(said) == 1)
    expected = Undelivered("REQUESTS", "sched", stream_seq=pulled[0].seq, deliveries=2)
    assert undelivered(said[0].delivery) == expected
    await said[0].ack()
    with pytest.raises(Permanent, match="expected an advisory"):
        undelivered(pulled[0].delivery)


async def test_nak_comes_again_after_its_delay(connect: Connect) -> None:
    bus = await connect()
    spec = dataclasses.replace(CONSUMER, ack_wait_s=300.0)
    pulled: list[tuple[float, Pulled]] = []
    await bus.pull(spec, lambda p: pulled.append((time.monotonic(), p)), paused=lambda: False)
    await store_requests(bus, 1)
    await eventually(lambda: len(pulled) == 1)

    await pulled[0][1].nak(0.3)

    await eventually(lambda: len(pulled) == 2)
    assert pulled[1][0] - pulled[0][0] > 0.25
    await pulled[1][1].ack()


async def test_a_paused_replica_asks_for_nothing(connect: Connect) -> None:
    bus = await connect()
    paused = True
    pulled: list[Pulled] = []
    await bus.pull(CONSUMER, pulled.append, paused=lambda: paused)
    await store_requests(bus, 1)
    await settle()
    assert pulled == []

    paused = False

    await eventually(lambda: len(pulled) == 1)
    await pulled[0].ack()


async def test_what_a_leaver_held_goes_to_another(connect: Connect) -> None:
    one, two = await connect("one"), await connect("two")
    first: list[Pulled] = []
    second: list[Pulled] = []
    spec = dataclasses.replace(CONSUMER, max_deliver=20)  # a slow leaver may be given it again
    leaving = await one.pull(spec, first.append, paused=lambda: False)
    await store_requests(one, 1)
    await eventually(lambda: len(first) >= 1)

    await leaving.close()
    await two.pull(spec, second.append, paused=lambda: False)

    await eventually(lambda: len(second) >= 1)
    assert second[0].num_delivered > first[0].num_delivered == 1
    await second[0].ack()


# The journal.


async def test_followers_and_readers_see_one_order(connect: Connect) -> None:
    gateway, *workers = [await connect(f"b{n}") for n in range(4)]
    followed: list[JournalItem] = []
    await gateway.follow(GATEWAY, followed.append)

    for index in range(100):
        for n, worker in enumerate(workers):
            worker.append(GATEWAY, frame(f"w{n}", index))
            worker.append(OTHER, frame(f"w{n}", index))
        if index % 10 == 0:
            await asyncio.sleep(0)
    assert all([await worker.flush(60.0) for worker in workers])

    await eventually(lambda: len(followed) == 300)
    read = [item async for item in gateway.read(GATEWAY, after_seq=0)]
    assert read == followed
    for n in range(3):
        own = [i.entry.entries[0].index for i in read if _worker(i) == f"w{n}"]  # type: ignore[union-attr]
        assert own == list(range(100))


def _worker(item: JournalItem) -> str:
    assert isinstance(item.entry, TokenFrame)
    return item.entry.worker


async def test_append_is_not_sent_before_it_returns_and_flush_waits(connect: Connect) -> None:
    bus = await connect()

    bus.append(GATEWAY, fence(1))

    assert not bus.ring_full
    assert await bus.flush(60.0)
    assert await bus.flush(0.0)
    assert await bus.last_seq(GATEWAY) == 1


async def test_record_gives_the_sequence(connect: Connect) -> None:
    bus = await connect()
    assert await bus.last_seq(GATEWAY) == 0

    first = await bus.record(GATEWAY, fence(2), timeout_s=60)
    await bus.record(OTHER, fence(2), timeout_s=60)
    second = await bus.record(GATEWAY, fence(3), timeout_s=60)

    assert (first, second) == (1, 3)
    assert await bus.last_seq(GATEWAY) == 3


async def test_read_between_two_sequences(connect: Connect) -> None:
    bus = await connect()
    for attempt in range(1, 11):
        bus.append(GATEWAY, fence(attempt))
    assert await bus.flush(60.0)

    some = [item.seq async for item in bus.read(GATEWAY, after_seq=3, until_seq=6)]
    rest = [item.seq async for item in bus.read(GATEWAY, after_seq=8)]
    none = [item.seq async for item in bus.read(GATEWAY, after_seq=10)]
    nobody = [item.seq async for item in bus.read(Incarnation("nobody"), after_seq=0)]

    assert (some, rest, none, nobody) == ([4, 5, 6], [9, 10], [], [])


async def test_an_entry_nobody_can_read_is_skipped_by_followers_and_readers(
    connect: Connect,
) -> None:
    bus = await connect()
    followed: list[JournalItem] = []
    await bus.follow(GATEWAY, followed.append)
    await bus.record(GATEWAY, fence(2), timeout_s=60)
    await bus.store(subjects.token(GATEWAY), beat(1), msg_id="alien", timeout_s=60)
    await bus.record(GATEWAY, fence(3), timeout_s=60)

    await eventually(lambda: len(followed) == 2)
    assert [item async for item in bus.read(GATEWAY, after_seq=0)] == followed
    assert [i.seq async for i in bus.read(GATEWAY, after_seq=0, until_seq=2)] == [1]


async def test_read_longer_than_a_batch(connect: Connect) -> None:
    bus = await connect()
    for attempt in range(1, 1301):
        bus.append(GATEWAY, fence(attempt))
        bus.append(OTHER, fence(attempt))
    assert await bus.flush(60.0)

    seqs = [item.seq async for item in bus.read(GATEWAY, after_seq=0)]

    assert len(seqs) == 1300
    assert seqs == sorted(seqs)


async def test_follow_starts_after_now(connect: Connect) -> None:
    bus = await connect()
    await bus.record(GATEWAY, fence(1), timeout_s=60)
    followed: list[int] = []

    await bus.follow(GATEWAY, lambda item: followed.append(item.seq))
    await bus.record(GATEWAY, fence(2), timeout_s=60)

    await eventually(lambda: bool(followed))
    assert followed == [2]


async def test_follow_from_a_sequence(connect: Connect) -> None:
    here, there = await connect(), await connect()
    for attempt in range(1, 6):
        await there.record(GATEWAY, fence(attempt), timeout_s=60)
    followed: list[int] = []

    following = await here.follow(GATEWAY, lambda item: followed.append(item.seq), after_seq=2)
    for attempt in range(6, 9):
        there.append(GATEWAY, fence(attempt))
    await eventually(lambda: len(followed) == 6)
    assert followed == [3, 4, 5, 6, 7, 8]

    await following.close()
    await there.record(GATEWAY, fence(9), timeout_s=60)
    await settle()
    assert followed[-1] == 8


async def test_follow_from_another_subjects_sequence(connect: Connect) -> None:
    bus = await connect()
    await bus.record(GATEWAY, fence(1), timeout_s=60)
    elsewhere = await bus.record(OTHER, fence(1), timeout_s=60)
    followed: list[int] = []

    await bus.follow(GATEWAY, lambda item: followed.append(item.seq), after_seq=elsewhere)
    await bus.record(GATEWAY, fence(2), timeout_s=60)

    await eventually(lambda: bool(followed))
    assert followed == [3]


async def test_a_foreign_journal_entry_is_skipped(connect: Connect) -> None:
    bus = await connect()
    followed: list[int] = []
    await bus.follow(GATEWAY, lambda item: followed.append(item.seq))

    await bus.store(subjects.token(GATEWAY), beat(), msg_id="x", timeout_s=60)
    await bus.record(GATEWAY, fence(1), timeout_s=60)

    await eventually(lambda: bool(followed))
    assert followed == [2]


# Buckets.


async def test_create_update_and_conflict(connect: Connect) -> None:
    bus = await connect()
    bucket = bus.bucket(LEASES, Beat)
    assert await bucket.get("a") is None

    first = await bucket.create("a", lease(1))
    with pytest.raises(Conflict):
        await bucket.create("a", lease(2))
    second = await bucket.update("a", lease(3), first)
    with pytest.raises(Conflict):
        await bucket.update("a", lease(4), first)
    with pytest.raises(Conflict):
        await bucket.update("b", lease(4), first)

    assert second > first
    assert await bucket.get("a") == Kept("a", lease(3), second)


async def test_one_of_several_wins(connect: Connect) -> None:
    bus = await connect()
    bucket = bus.bucket(LEASES, Beat)

    results = await asyncio.gather(
        *(bucket.create("a", lease(n)) for n in range(8)), return_exceptions=True
    )

    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 7


async def test_put_and_delete_and_create_again(connect: Connect) -> None:
    bus = await connect()
    bucket = bus.bucket(LEASES, Beat)

    await bucket.put("a", lease(1))
    await bucket.put("a", lease(2))
    await bucket.delete("a")
    await bucket.delete("never")
    assert await bucket.get("a") is None

    revision = await bucket.create("a", lease(3))
    assert await bucket.get("a") == Kept("a", lease(3), revision)


async def test_keys_with_dots_and_history(connect: Connect) -> None:
    bus = await connect()
    bucket = bus.bucket(CONFIG, Beat)

    await bucket.put("scheduler.x-1", lease(1))
    revision = await bucket.put("scheduler.x-1", lease(2))

    assert await bucket.get("scheduler.x-1") == Kept("scheduler.x-1", lease(2), revision)


async def test_a_ttl_of_less_than_a_second_is_a_second(connect: Connect) -> None:
    bus = await connect()
    bucket = bus.bucket(LEASES, Beat)

    began_s = time.monotonic()
    revision = await bucket.create("a", lease(1), ttl_s=0.1)
    async with asyncio.timeout(60):
        while await bucket.get("a") is not None:
            await asyncio.sleep(0.05)
    assert time.monotonic() - began_s > 0.95

    with pytest.raises(Conflict):
        await bucket.update("a", lease(2), revision)
    await bucket.create("a", lease(2))


async def test_a_rewrite_renews_the_ttl_and_one_without_ends_it(connect: Connect) -> None:
    bus = await connect()
    bucket = bus.bucket(LEASES, Beat)
    await bucket.put("forever", lease(1), ttl_s=1.0)
    await bucket.put("forever", lease(2))
    await bucket.put("renewed", lease(1), ttl_s=1.0)
    await bucket.put("renewed", lease(2), ttl_s=60.0)

    await asyncio.sleep(2.2)

    assert await bucket.get("forever") is not None
    assert await bucket.get("renewed") is not None


async def test_watch_gives_what_is_there_then_changes(connect: Connect) -> None:
    here, there = await connect(), await connect()
    watched, written = here.bucket(LEASES, Beat), there.bucket(LEASES, Beat)
    await written.put("a", lease(1))
    await written.put("b", lease(2))
    await written.delete("b")
    seen: list[tuple[str, int | None]] = []

    def note(change: Kept[Beat] | Gone) -> None:
        seen.append((change.key, change.value.count if isinstance(change, Kept) else None))

    watch = await watched.watch(note)
    assert seen == [("a", 1)]

    revision = await written.create("c", lease(3))
    await eventually(lambda: len(seen) == 2)  # a watch owes the last value, not each
    await written.update("c", lease(4), revision)
    await written.delete("a")
    await eventually(lambda: len(seen) == 4)
    assert seen[1:] == [("c", 3), ("c", 4), ("a", None)]

    await watch.close()
    await written.put("d", lease(5))
    await settle()
    assert len(seen) == 4


async def test_watch_of_an_empty_bucket_returns(connect: Connect) -> None:
    bus = await connect()
    seen: list[Any] = []

    await bus.bucket(LEASES, Beat).watch(seen.append)

    assert seen == []


async def test_watch_reports_expired_keys(connect: Connect) -> None:
    here, there = await connect(), await connect()
    written = there.bucket(LEASES, Beat)
    await written.put("listed", lease(1), ttl_s=8.0)
    await written.put("kept", lease(1), ttl_s=60.0)
    gone: list[str] = []
    await here.bucket(LEASES, Beat).watch(
        lambda change: gone.append(change.key) if isinstance(change, Gone) else None
    )
    await written.put("changed", lease(1), ttl_s=1.0)

    await eventually(lambda: len(gone) == 2, timeout_s=60.0)

    assert sorted(gone) == ["changed", "listed"]
    assert await written.get("changed") is None


async def test_watch_forgets_what_is_final(connect: Connect) -> None:
    here, there = await connect(), await connect()
    written = there.bucket(LEASES, Beat)
    await written.put("over", lease(9), ttl_s=8.0)
    await written.put("live", lease(1), ttl_s=8.0)
    seen: list[tuple[str, int | None]] = []

    def note(change: Kept[Beat] | Gone) -> None:
        seen.append((change.key, change.value.count if isinstance(change, Kept) else None))

    await here.bucket(LEASES, Beat).watch(note, final=lambda beat: beat.count == 9)
    assert sorted(seen) == [("live", 1), ("over", 9)]
    await written.put("ends", lease(1))
    await eventually(lambda: seen[-1] == ("ends", 1), timeout_s=60.0)
    await written.put("ends", lease(9), ttl_s=1.0)
    await eventually(lambda: ("live", None) in seen, timeout_s=60.0)
    await settle()
    assert seen[2:] == [("ends", 1), ("ends", 9), ("live", None)]
    await written.put("ends", lease(1))
    await eventually(lambda: seen[-1] == ("ends", 1))


# Objects.


async def test_objects(connect: Connect) -> None:
    here, there = await connect(), await connect()
    data = bytes(range(256)) * 4096
    assert await here.get_object(MODELS, "m/1 b") is None

    await here.put_object(MODELS, "m/1 b", data)
    assert await there.get_object(MODELS, "m/1 b") == data

    await here.put_object(MODELS, "m/1 b", b"new")
    await here.put_object(MODELS, "empty", b"")
    assert await there.get_object(MODELS, "m/1 b") == b"new"
    assert await there.get_object(MODELS, "empty") == b""


async def test_values_are_what_a_bucket_holds_now(connect: Connect) -> None:
    here, there = await connect(), await connect()
    leases = here.bucket(LEASES, Beat)
    assert await leases.values() == []
    for count, key in enumerate(("a", "b", "a", "deep.er.key")):
        await leases.put(key, beat(count))
    await leases.delete("b")
    found = {kept.key: kept for kept in await there.bucket(LEASES, Beat).values()}
    assert {key: kept.value.count for key, kept in found.items()} == {"a": 2, "deep.er.key": 3}
    await leases.update("a", beat(9), found["a"].revision)


async def test_a_deleted_object_leaves_no_trace(connect: Connect) -> None:
    here, there = await connect(), await connect()
    for name in ("first", "second / b", "third"):
        await here.put_object(PROMPTS, name, bytes(300_000))
    await here.put_object(PROMPTS, "first", b"again: now the newest")
    assert await there.object_names(PROMPTS) == ["second / b", "third", "first"]
    assert await there.object_names(MODELS) == []

    await there.delete_object(PROMPTS, "third")
    await there.delete_object(PROMPTS, "third")
    assert await here.get_object(PROMPTS, "third") is None
    assert await here.object_names(PROMPTS) == ["second / b", "first"]

    await here.delete_object(PROMPTS, "first")
    await here.delete_object(PROMPTS, "second / b")
    assert await here.object_names(PROMPTS) == []
    if isinstance(here, JetStreamBus):
        info = await api(here._connection, "STREAM.INFO.OBJ_prompts", {}, timeout_s=60.0)
        assert (info["state"]["messages"], info["state"]["bytes"]) == (0, 0)


async def test_the_backlog_says_what_is_done_in_order(connect: Connect) -> None:
    bus = await connect()
    spec = dataclasses.replace(CONSUMER, ack_wait_s=30.0)
    pulled: list[Pulled] = []
    subscription = await bus.pull(spec, pulled.append, paused=lambda: False)
    await store_requests(bus, 3)
    await eventually(lambda: len(pulled) == 3)
    await pulled[0].ack()
    await pulled[2].ack()
    await until_done(bus, pulled[0].seq)
    assert (await bus.backlog(CONSUMER)).newest_seq == pulled[2].seq
    await pulled[1].ack()
    await until_done(bus, pulled[2].seq)
    await subscription.close()
    await store_requests(bus, 1, start=3)
    behind = await bus.backlog(CONSUMER)
    assert (behind.newest_seq, behind.done_seq) == (pulled[2].seq + 1, pulled[2].seq)


async def until_done(bus: Bus, seq: int) -> None:
    async with asyncio.timeout(60):
        while (await bus.backlog(CONSUMER)).done_seq != seq:
            await asyncio.sleep(0.01)

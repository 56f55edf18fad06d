"""Transfers as an operator sees them: what overlaps with compute, and both sides' stories."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diptych_contracts import subjects
from diptych_contracts.cards import Fingerprint
from diptych_contracts.control import KvAsk, KvSnapshot, KvTransfer
from diptych_contracts.fleet import Role
from diptych_contracts.ids import transfer_id
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.transfers import Reserve, ReserveAnswer, ReserveRefused
from diptych_engine.step_loop import PREFILL_TOKENS
from diptych_telemetry import metrics, names
from diptych_telemetry.traces import recorded_spans
from diptych_testkit.builders import a_generation, a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine

CHUNKS = 9
STEP_S = 0.1
LINK_S = 0.08
"""What one chunk's KV takes: nearly as long as the chunk."""
BUS_S = 0.02
"""More than what messages and turns take in virtual time; a quarter of a chunk's transfer."""


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    with recorded_spans() as recorded:
        yield recorded


def span(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = (s for s in spans.get_finished_spans() if s.name == name)
    return found


def told(spans: InMemorySpanExporter, name: str, attribute: str) -> Any:
    attributes = span(spans, name).attributes
    assert attributes is not None
    return attributes[attribute]


async def asked(fleet: SmallFleet, name: str, ask: KvAsk) -> KvSnapshot:
    subject = subjects.control(fleet.incarnation(name))
    snapshot: KvSnapshot = await fleet.bus.request(subject, ask, KvSnapshot, timeout_s=60)
    return snapshot


async def both(fleet: SmallFleet, request: str) -> tuple[KvTransfer, KvTransfer]:
    """What p1 and d1 tell of the request's one transfer."""
    ask = KvAsk(about=request)
    (written,) = (await asked(fleet, "p1", ask)).outgoing
    (read,) = (await asked(fleet, "d1", ask)).transfers
    return written, read


def a_pair(fleet: SmallFleet, *, step_s: float = 0.0, **of_d: Any) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(step_s=step_s))
    fleet.worker("d1", Role.DECODE, engine=ToyStepEngine(), **of_d)


async def answered(fleet: SmallFleet, request: str, *, tokens: int, link: str) -> None:
    prompt = tuple(1 + n % 900 for n in range(tokens))
    forced = Forced(mode=Mode.REMOTE, link=link)
    await fleet.client.send(a_request(request, prompt_ids=prompt, forced=forced))
    await fleet.client.ended(request)
    await fleet.settled()


@pytest.mark.virtual_time
@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("block_tokens", [64, 16])
async def test_after_compute_at_most_one_chunk_is_still_to_cross(
    link: str, block_tokens: int, spans: InMemorySpanExporter
) -> None:
    """Blocks leave as soon as their chunk is final, whatever their size, while the next computes.

    The whole KV takes nine times as long as what remains.
    """
    async with small_fleet() as fleet:
        fleet.scheduler()
        engine = ToyStepEngine(step_s=STEP_S, block_tokens=block_tokens)
        fleet.worker("p1", Role.PREFILL, engine=engine, transfer_slots=128)
        peer = ToyStepEngine(block_tokens=block_tokens)
        fleet.worker("d1", Role.DECODE, engine=peer, transfer_slots=128)
        await fleet.ready()
        assert fleet.network is not None
        weather = fleet.network.weather
        chunk_bytes = engine.spec.layout.slot_bytes * PREFILL_TOKENS // block_tokens
        weather.bytes_per_s = chunk_bytes / LINK_S
        await answered(fleet, "r1", tokens=CHUNKS * PREFILL_TOKENS, link=link)
        written, read = await both(fleet, "r1")

    one_chunk_ms = weather.takes_s(chunk_bytes) * 1000
    for remainder_ms in (
        written.remainder_ms,
        told(spans, names.KV_TRANSFER, names.REMAINDER_MS),
        told(spans, names.DECODE_RUN, names.REMAINDER_MS),
    ):
        assert 0 < remainder_ms <= one_chunk_ms + BUS_S * 1000
    writing, all_written = (
        next(step.ago_ms for step in written.steps if step.state == state)
        for state in ("writing", "written")
    )
    assert writing - all_written >= (CHUNKS - 1) * LINK_S * 1000, "it did cross meanwhile"
    assert read.n_bytes == written.n_bytes


@pytest.mark.virtual_time
async def test_both_sides_tell_one_story(spans: InMemorySpanExporter) -> None:
    before = metrics.transfers().remainder.labels("tcp")._sum.get()
    async with small_fleet() as fleet:
        a_pair(fleet, step_s=0.01)
        await fleet.ready()
        await answered(fleet, "r1", tokens=200, link="tcp")
        written, read = await both(fleet, "r1")
        listed = await asked(fleet, "p1", KvAsk(ended=5))
        nothing = await asked(fleet, "p1", KvAsk())

    assert written.transfer_id == read.transfer_id == "r1.1"
    assert [step.state for step in written.steps] == [
        "asked",
        "reserved",
        "writing",
        "written",
        "released",
    ]
    assert [step.state for step in read.steps] == ["reserved", "written", "verified", "released"]
    ago = [step.ago_ms for step in written.steps]
    assert ago == sorted(ago, reverse=True)
    assert (written.state, written.reason) == ("released", "handed over")
    assert (read.state, read.reason) == ("released", "imported")
    assert (written.writer, written.reader) == (read.writer, fleet.incarnation("d1"))
    assert (written.link, read.link) == ("tcp", "tcp")
    assert written.n_bytes == read.n_bytes > 0
    assert written.ended_ms >= 1
    assert read.ended_ms >= 1
    assert [one.transfer_id for one in listed.outgoing] == ["r1.1"]
    assert listed.outgoing[0].steps == ()
    assert nothing.outgoing == ()
    for name in (names.KV_RESERVE, names.KV_TRANSFER, names.KV_VERIFY):
        assert told(spans, name, names.TRANSFER_ID) == "r1.1"
        assert told(spans, name, names.LINK) == "tcp"
    remainder_s = told(spans, names.DECODE_RUN, names.REMAINDER_MS) / 1000
    counted = metrics.transfers().remainder.labels("tcp")._sum.get() - before
    assert counted == pytest.approx(remainder_s, abs=1e-5)


@pytest.mark.virtual_time
async def test_why_a_reservation_was_refused_is_remembered() -> None:
    async with small_fleet() as fleet:
        a_pair(fleet)
        await fleet.ready()
        spec = ToyStepEngine().spec
        generation = a_generation("r1")
        reserve = Reserve(
            transfer_id=transfer_id(generation.request_id, generation.attempt),
            generation=generation,
            prefill_worker=fleet.incarnation("p1"),
            link="tcp",
            layout=spec.layout,
            fingerprint=Fingerprint(base="other weights", weights="none"),
        )
        subject = subjects.kv(fleet.incarnation("d1"), "reserve")
        answer = await fleet.bus.request(subject, reserve, ReserveAnswer, timeout_s=60)
        assert isinstance(answer, ReserveRefused)
        (refused,) = (await asked(fleet, "d1", KvAsk(about="r1"))).transfers
        others = await asked(fleet, "d1", KvAsk(about="r2", ended=9))
    assert (refused.state, refused.transfer_id) == ("refused", "r1.1")
    assert "other weights" in refused.reason
    assert [step.state for step in refused.steps] == ["refused"]
    assert refused.ended_ms >= 1
    assert others.transfers == others.outgoing == ()


@pytest.mark.virtual_time
async def test_a_slot_is_named_with_what_holds_it() -> None:
    async with small_fleet() as fleet:
        a_pair(fleet, step_s=0.5)
        await fleet.ready()
        prompt = tuple(range(1, 201))
        forced = Forced(mode=Mode.REMOTE, link="tcp")
        await fleet.client.send(a_request("r1", prompt_ids=prompt, forced=forced))
        await fleet.until_reserved("d1")
        snapshot = await asked(fleet, "d1", KvAsk(slots=True))
        (held,) = snapshot.transfers
        assert held.transfer_id == "r1.1"
        assert (held.state, held.in_quarantine, held.ended_ms) == ("reserved", False, 0)
        assert (len(held.slots), held.generations) == (4, (1, 1, 1, 1))
        assert (snapshot.slots_used, snapshot.slots_quarantined) == (4, 0)
        assert held.left_ms > 0
        (going,) = (await asked(fleet, "p1", KvAsk())).outgoing
        assert (going.transfer_id, going.ended_ms) == (held.transfer_id, 0)
        assert going.left_ms > 0
        await fleet.client.ended("r1")
        await fleet.settled()
        assert (await asked(fleet, "d1", KvAsk(slots=True))).transfers == ()

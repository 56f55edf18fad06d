"""KV that is not what it should be is refused, counted, traced, and computed again.

One page for one promise: a corrupted block, a stale ticket, another tenant's block and a wrong
model never reach an engine, whichever link carried them. Each is refused with its own reason
(`diptych_kv_refused_total{reason}`, span attribute `diptych.kv.refused`), and where a request stood
behind it, its answer is the undisturbed one.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from secrets import token_hex
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diptych_bus.memory import MemoryBus
from diptych_contracts import subjects
from diptych_contracts.cards import Fingerprint
from diptych_contracts.errors import Refused
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.jobs import (
    BlockDigest,
    Cancel,
    CancelDone,
    DecodeJob,
    Generation,
    JobAccepted,
    JobAnswer,
    JobRefused,
    RefusalReason,
)
from diptych_contracts.journal import EndReason, Report
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.tickets import TicketFault, TicketSeal
from diptych_contracts.transfers import Reserve, ReserveAnswer, ReserveRefused, Ticket
from diptych_contracts.wire import encode
from diptych_engine.port import StepInput
from diptych_engine.sim import SimStepEngine
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.verifying import checksum, context_salt
from diptych_kvlink.writer_links import WriterLinks
from diptych_telemetry import names
from diptych_telemetry.metrics import REGISTRY
from diptych_telemetry.traces import recorded_spans
from diptych_testkit.builders import a_generation, a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

PROMPT = tuple(range(1, 201))
TOKENS = 16
both_links = pytest.mark.parametrize("link", ["shm", "tcp"])
SPEC = ToyStepEngine().spec


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    with recorded_spans() as recorded:
        yield recorded


def refused(reason: str) -> float:
    """How often KV was refused for `reason`."""
    name, labels = "diptych_kv_refused_total", {"reason": reason}
    return REGISTRY.get_sample_value(name, labels) or 0.0


def reasons_on(spans: InMemorySpanExporter, span: str) -> list[Any]:
    """What the trace says of refusals, in spans of that name."""
    found = [s.attributes or {} for s in spans.get_finished_spans() if s.name == span]
    return [seen[names.KV_REFUSED] for seen in found if names.KV_REFUSED in seen]


async def a_pair(fleet: SmallFleet) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL)
    fleet.worker("d1", Role.DECODE)
    await fleet.ready()


async def is_answered_on_the_second_attempt(fleet: SmallFleet, link: str) -> None:
    forced = Forced(mode=Mode.REMOTE, link=link)
    await fleet.client.send(a_request("r1", prompt_ids=PROMPT, forced=forced))
    end = await fleet.client.ended("r1")
    assert (end.reason, end.attempt) == (EndReason.LENGTH, 2)
    assert fleet.client.delivered["r1"] == toy_answer(PROMPT, TOKENS)
    await fleet.settled()


# A corrupted block


def flip_a_byte(incoming: IncomingTransfers, job: DecodeJob) -> None:
    """As a stray write would, in the reader's own memory."""
    ref = incoming._held._refs[job.transfer_id][1]
    slot = incoming._held.targets[0]._map.slot(ref.slot, 64)  # type: ignore[attr-defined]
    slot[7] ^= 1


@both_links
async def test_a_block_altered_in_memory_is_refused_and_computed_again(
    link: str, monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter
) -> None:
    claim, flipped = IncomingTransfers.claim, []

    def claim_altered(self: IncomingTransfers, job: DecodeJob, **more: Any) -> Any:
        if not flipped:
            flip_a_byte(self, job)
            flipped.append(job.transfer_id)
        return claim(self, job, **more)

    monkeypatch.setattr(IncomingTransfers, "claim", claim_altered)
    before = refused("checksum")
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await is_answered_on_the_second_attempt(fleet, link)
    assert refused("checksum") == before + 1
    assert reasons_on(spans, names.KV_VERIFY) == ["checksum"]
    assert reasons_on(spans, names.KV_TRANSFER) == ["unverified_kv"]


async def test_a_block_altered_on_the_wire_is_refused_and_computed_again(
    monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter
) -> None:
    send_all, flipped = TcpStream.send_all, []

    def send_altered(stream: TcpStream, buffers: Any) -> None:
        parts = list(buffers)
        if not flipped and len(parts) > 1:  # a batch: its head, then its blocks
            altered = bytearray(parts[1])
            altered[5] ^= 0x40
            parts[1] = altered
            flipped.append(stream)
        send_all(stream, parts)

    monkeypatch.setattr(TcpStream, "send_all", send_altered)
    before = refused("checksum")
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await is_answered_on_the_second_attempt(fleet, "tcp")
    assert flipped
    assert refused("checksum") == before + 1
    assert reasons_on(spans, names.KV_VERIFY) == ["checksum"]


# A decode worker alone, and somebody who writes into it by hand


class Writer:
    """A prefill worker played by the test: it says and writes what it likes."""

    def __init__(self, fleet: SmallFleet, link: str) -> None:
        self.me = Incarnation(f"p-test-{token_hex(4)}")  # its memory has a name on this machine
        self.reader = fleet.incarnation("d1")
        self._bus: MemoryBus = fleet.broker.connect("p-test")
        self._link_kind = link
        self._links = WriterLinks(self.me)
        self._written: list[Ticket] = []
        self._seal: TicketSeal | None = None

    async def reserve(self, generation: Generation, **changes: Any) -> Ticket | ReserveRefused:
        fields: dict[str, Any] = {
            "transfer_id": transfer_id(generation.request_id, generation.attempt),
            "generation": generation,
            "prefill_worker": self.me,
            "link": self._link_kind,
            "layout": SPEC.layout,
            "fingerprint": Fingerprint(base="toy", weights="none"),
            "certificate": self._links.certificate,
        }
        answer: ReserveAnswer = await self._bus.request(
            subjects.kv(self.reader, "reserve"),
            Reserve(**(fields | changes)),
            ReserveAnswer,
            timeout_s=60,
        )
        if isinstance(answer, Ticket):
            self._seal = answer.seal
        return answer

    async def ticket(self, generation: Generation) -> Ticket:
        answer = await self.reserve(generation)
        assert isinstance(answer, Ticket), answer
        return answer

    async def write(self, ticket: Ticket, generation: Generation) -> tuple[BlockDigest, ...]:
        """The KV of `generation`'s prompt, as the engine would export it."""
        return await asyncio.to_thread(self._write, ticket, generation)

    def _write(self, ticket: Ticket, generation: Generation) -> tuple[BlockDigest, ...]:
        link = self._links.open(ticket.endpoint)
        link.connect()
        self._written.append(ticket)
        salt, digests = context_salt(generation, "toy"), []
        for index, data in enumerate(exported(generation.prompt_ids)):
            buffer = link.buffer(ticket.slots[index])[: len(data)]
            buffer[:] = data
            assert ticket.seal is not None
            link.send([(ticket.slots[index], buffer.toreadonly())], encode(ticket.seal))
            link.confirm()
            n_bytes, seen = len(data), checksum(memoryview(data), salt)
            digests.append(BlockDigest(index=index, n_bytes=n_bytes, checksum=seen))
        return tuple(digests)

    async def hand_over(
        self, generation: Generation, blocks: tuple[BlockDigest, ...], **changes: Any
    ) -> JobAnswer:
        fields: dict[str, Any] = {
            "generation": generation,
            "prefill_worker": self.me,
            "transfer_id": transfer_id(generation.request_id, generation.attempt),
            "first_ids": tuple(toy_answer(generation.prompt_ids, 1)),
            "blocks": blocks,
            "report": Report(),
            "seal": self._seal,
        }
        answer: JobAnswer = await self._bus.request(
            subjects.job(self.reader), DecodeJob(**(fields | changes)), JobAnswer, timeout_s=60
        )
        return answer

    async def cancel(self, generation: Generation) -> None:
        cancel = Cancel(request_id=generation.request_id, attempt=generation.attempt)
        await self._bus.request(subjects.cancel(self.reader), cancel, CancelDone, timeout_s=60)

    def stop(self) -> None:
        """Say that nothing is written any more: it has no slot open."""
        for ticket in self._written:
            for ref in ticket.slots:
                self._links.open(ticket.endpoint).stop(ref)

    async def close(self) -> None:
        await asyncio.to_thread(self._links.close)
        await self._bus.close()


def exported(prompt: tuple[int, ...]) -> list[bytes]:
    """A prompt's KV, block by block."""
    engine = ToyStepEngine()
    blocks, size = [], SPEC.layout.block_tokens
    engine.step([StepInput(seq=0, token_ids=prompt, position=0, want_logits=False)])
    for p0 in range(0, len(prompt), size):
        room = bytearray(SPEC.layout.slot_bytes)
        n_bytes = SimStepEngine.export_block(
            engine, 0, p0, min(p0 + size, len(prompt)), memoryview(room)
        )
        blocks.append(bytes(room[:n_bytes]))
    return blocks


@asynccontextmanager
async def a_decode_worker(link: str, **settings: Any) -> AsyncIterator[tuple[SmallFleet, Writer]]:
    async with small_fleet() as fleet:
        fleet.worker("d1", Role.DECODE, **settings)
        await fleet.ready()
        writer = Writer(fleet, link)
        try:
            yield fleet, writer
            writer.stop()
            await fleet.settled()
        finally:
            await writer.close()


def is_refused(answer: JobAnswer, reason: RefusalReason, fault: TicketFault | None = None) -> None:
    assert isinstance(answer, JobRefused), answer
    assert (answer.reason, answer.fault) == (reason, fault)


@both_links
async def test_what_is_right_is_taken(link: str) -> None:
    """The hand-made writer is one: what it is refused for below is what the test changed."""
    generation = a_generation("r1", prompt_ids=PROMPT)
    async with a_decode_worker(link) as (_, writer):
        blocks = await writer.write(await writer.ticket(generation), generation)
        assert isinstance(await writer.hand_over(generation, blocks), JobAccepted)


# A stale ticket


@both_links
async def test_a_ticket_whose_lease_is_over_is_refused(
    link: str, spans: InMemorySpanExporter
) -> None:
    generation = a_generation("r1", prompt_ids=PROMPT)
    before = refused("ticket_expired")
    async with a_decode_worker(link, lease_s=5.0) as (fleet, writer):
        blocks = await writer.write(await writer.ticket(generation), generation)
        await fleet.until_load(lambda: fleet.loads["d1"].kv_tokens_used == 0)
        answer = await writer.hand_over(generation, blocks)
        is_refused(answer, RefusalReason.UNKNOWN_TICKET, TicketFault.EXPIRED)
        assert isinstance(answer, JobRefused)
        assert "expired: deadline of state reserved passed" in answer.detail
    assert refused("ticket_expired") == before + 1
    assert reasons_on(spans, names.KV_VERIFY) == ["ticket_expired"]


R9 = transfer_id(RequestId("r9"), 1)
MISUSES: dict[str, tuple[dict[str, Any], TicketFault]] = {
    "no ticket": ({"seal": None}, TicketFault.MISSING),
    "an altered one": ({"seal": {"expires_ms": 10**15}}, TicketFault.ALTERED),
    "another tenant's": ({"generation": {"tenant": "theirs"}}, TicketFault.TENANT),
    "another request's": ({"generation": {"request_id": RequestId("r9")}}, TicketFault.REQUEST),
    "an older attempt's": ({"generation": {"attempt": 3}}, TicketFault.REQUEST),
    "another transfer's": ({"transfer_id": R9}, TicketFault.REQUEST),
    "another worker's": ({"prefill_worker": Incarnation("p-other-1")}, TicketFault.WRITER),
}


@pytest.mark.parametrize("whose", MISUSES)
async def test_a_ticket_that_is_not_the_jobs_is_refused_and_its_holder_may_still_come(
    whose: str, spans: InMemorySpanExporter
) -> None:
    generation = a_generation("r1", attempt=2, prompt_ids=PROMPT)
    changes, fault = MISUSES[whose]
    before = refused(fault)
    async with a_decode_worker("shm") as (_, writer):
        ticket = await writer.ticket(generation)
        blocks = await writer.write(ticket, generation)
        whole = {"generation": generation, "seal": ticket.seal}
        bent = {
            name: msgspec.structs.replace(whole[name], **change)
            if isinstance(change, dict)
            else change
            for name, change in changes.items()
        }
        named = {"transfer_id": ticket.transfer_id} | bent
        answer = await writer.hand_over(named.pop("generation", generation), blocks, **named)
        is_refused(answer, RefusalReason.UNKNOWN_TICKET, fault)
        assert isinstance(await writer.hand_over(generation, blocks), JobAccepted)
    assert refused(fault) == before + 1
    assert reasons_on(spans, names.KV_VERIFY) == [fault]


async def test_a_write_under_a_ticket_of_another_request_is_refused_and_counted() -> None:
    """Over tcp; what arrives for the rightful one afterwards is decoded from."""
    mine, other = (a_generation(name, prompt_ids=PROMPT) for name in ("r1", "r2"))
    before = refused("ticket_request")
    async with a_decode_worker("tcp") as (fleet, writer):
        ticket, foreign = await writer.ticket(mine), await writer.ticket(other)
        forged = msgspec.structs.replace(ticket, seal=foreign.seal)
        with pytest.raises(Refused, match="ticket_request"):
            await writer.write(forged, mine)
        blocks = await writer.write(ticket, mine)
        answer = await writer.hand_over(mine, blocks, seal=ticket.seal)
        assert isinstance(answer, JobAccepted)
        await writer.cancel(other)
        await fleet.until_load(lambda: refused("ticket_request") > before)
    assert refused("ticket_request") == before + 1


async def test_a_ticket_is_taken_once_and_a_late_copy_of_its_job_is_a_duplicate() -> None:
    generation = a_generation("r1", prompt_ids=PROMPT)
    async with a_decode_worker("shm") as (fleet, writer):
        blocks = await writer.write(await writer.ticket(generation), generation)
        await writer.hand_over(generation, blocks)
        await fleet.settled()
        answer = await writer.hand_over(generation, blocks)
        assert isinstance(answer, JobAccepted)
        assert answer.duplicate


@both_links
async def test_a_slot_reference_of_an_earlier_generation_cannot_be_written(link: str) -> None:
    """The slot belongs to somebody else by now: its generation has risen."""
    first = a_generation("r1", prompt_ids=PROMPT)
    second = a_generation("r2", prompt_ids=PROMPT)
    async with a_decode_worker(link, transfer_slots=4) as (fleet, writer):
        stale = await writer.ticket(first)
        await writer.write(stale, first)
        writer.stop()
        await writer.cancel(first)
        await fleet.until_load(lambda: fleet.loads["d1"].transfer_slots_used == 0)
        fresh = await writer.ticket(second)
        assert {ref.slot for ref in fresh.slots} == {ref.slot for ref in stale.slots}
        assert all(ref.generation > 1 for ref in fresh.slots)
        with pytest.raises(Refused, match="closed for generation 1"):
            await writer.write(stale, first)
        blocks = await writer.write(fresh, second)
        assert isinstance(await writer.hand_over(second, blocks), JobAccepted)


# Another tenant's block


@both_links
async def test_a_block_of_another_tenant_is_refused(link: str, spans: InMemorySpanExporter) -> None:
    """Its bytes are whole and of the same prompt; only whose they are differs."""
    mine = a_generation("r1", prompt_ids=PROMPT, tenant="mine")
    theirs = msgspec.structs.replace(mine, tenant="theirs")
    before = refused("checksum")
    async with a_decode_worker(link) as (_, writer):
        blocks = await writer.write(await writer.ticket(mine), theirs)
        is_refused(await writer.hand_over(mine, blocks), RefusalReason.UNVERIFIED_KV)
    assert refused("checksum") == before + 1
    assert reasons_on(spans, names.KV_VERIFY) == ["checksum"]


async def test_a_job_of_another_prompt_does_not_get_the_tickets_blocks(
    spans: InMemorySpanExporter,
) -> None:
    mine = a_generation("r1", prompt_ids=PROMPT, tenant="mine")
    other = msgspec.structs.replace(mine, prompt_ids=PROMPT[::-1])
    before = refused("context")
    async with a_decode_worker("shm") as (_, writer):
        blocks = await writer.write(await writer.ticket(mine), mine)
        is_refused(await writer.hand_over(other, blocks), RefusalReason.UNVERIFIED_KV)
    assert refused("context") == before + 1
    assert reasons_on(spans, names.KV_VERIFY) == ["context"]


async def test_a_cached_prefix_of_another_tenant_is_computed_again() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(prefix_sequences=4))
        fleet.worker("d1", Role.DECODE)
        await fleet.ready()
        cached = {}
        for name, tenant in (("r1", "a"), ("r2", "b"), ("r3", "a")):
            await fleet.client.send(a_request(name, prompt_ids=PROMPT, tenant=tenant))
            end = await fleet.client.ended(name)
            assert fleet.client.delivered[name] == toy_answer(PROMPT, TOKENS)
            assert end.report is not None
            cached[name] = end.report.cached_tokens
        assert cached == {"r1": 0, "r2": 0, "r3": 192}


# A wrong model


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"fingerprint": Fingerprint(base="other", weights="none")},
            "model fingerprint differs in base (expected 'toy', got 'other')",
        ),
        (
            {"fingerprint": Fingerprint(base="toy", weights="Q4_1")},
            "model fingerprint differs in weights (expected 'none', got 'Q4_1')",
        ),
        (
            {"layout": msgspec.structs.replace(SPEC.layout, engine_build="sim-2")},
            "KV layout differs in engine_build (expected 'sim-1', got 'sim-2')",
        ),
    ],
)
async def test_kv_of_another_model_gets_no_ticket(changes: dict[str, Any], says: str) -> None:
    generation = a_generation("r1", prompt_ids=PROMPT)
    before = refused("wrong_model")
    async with a_decode_worker("shm") as (_, writer):
        answer = await writer.reserve(generation, **changes)
        assert isinstance(answer, ReserveRefused)
        assert answer.reason is RefusalReason.WRONG_MODEL
        assert says in answer.detail
    assert refused("wrong_model") == before + 1


async def test_workers_of_different_weights_are_never_paired() -> None:
    engine = ToyStepEngine()
    other = Fingerprint(base=engine.spec.fingerprint.base, weights="Q8_0")
    engine.spec = replace(engine.spec, fingerprint=other)
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("d1", Role.DECODE)
        fleet.worker("p1", Role.PREFILL, engine=engine)
        await fleet.ready()
        await fleet.client.send(a_request("r1", prompt_ids=PROMPT))
        end = await fleet.client.ended("r1")
        assert fleet.client.delivered["r1"] == toy_answer(PROMPT, TOKENS)
        assert end.report is not None
        assert (end.report.mode, end.attempt) == (Mode.LOCAL, 1)
        await fleet.settled()

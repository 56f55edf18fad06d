"""KV that is encoded, sealed or both: the answer is the same wherever nothing is lost, a worker
that must not lose anything is never given what does, and what cannot be opened is never decoded.
"""

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from diptych_contracts.fleet import Role
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Forced, Mode
from diptych_engine.port import KvBlock
from diptych_kvlink.incoming import IncomingTransfers
from diptych_telemetry import names
from diptych_telemetry.traces import recorded_spans
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

PROMPT = tuple(range(1, 201))
TOKENS = 16
LAYERS, DIM = 4, 64


class BlobEngine(ToyStepEngine):
    """Its KV lies as llama.cpp's does: ids among the cells, which codecs keep, and real rows."""

    def __init__(self) -> None:
        super().__init__()
        layout = msgspec.structs.replace(
            self.spec.layout,
            layout_id="llama-seq-v1",
            dtype="f16",
            slot_bytes=len(blob(range(self.spec.layout.block_tokens))),
        )
        self.spec = dataclasses.replace(self.spec, layout=layout)
        self.errors: list[float] = []
        """How far each imported row is from what was exported."""

    def export_block(self, seq: int, p0: int, p1: int, out: memoryview) -> int:
        data = blob(self._held(seq, p0, p1))
        out[: len(data)] = data
        return len(data)

    def import_block(self, seq: int, block: KvBlock) -> None:
        count = block.p1 - block.p0
        cells = np.frombuffer(block.data, "<i4", 3 * count, 16).reshape(count, 3)
        exact = blob(cells[:, 0].tolist())
        assert len(exact) == block.data.nbytes
        self.errors.append(float(np.abs(rows(block.data, count) - rows(exact, count)).max()))
        sequence = self._ending_at(seq, block.p0)
        sequence.cells += self._cells.take(count)
        sequence.history.tokens.extend(cells[:, 0].tolist())


def blob(ids: Any) -> bytes:
    ids = list(ids)
    head = struct.pack("<4i", -1357628200, 34, 1, len(ids))
    head += b"".join(struct.pack("<3i", token, 1, 34) for token in ids)
    parts = [head, struct.pack("<4i", 0, LAYERS, 0, 0)]
    values = np.random.default_rng(sum(ids)).standard_normal((2 * LAYERS, len(ids), DIM))
    for tensor in values.astype("<f2"):
        parts += [struct.pack("<iQ", 1, 2 * DIM), tensor.tobytes()]
    return b"".join(parts)


def rows(data: Any, count: int) -> Any:
    tensors = np.frombuffer(data, np.uint8, offset=32 + 12 * count).reshape(2 * LAYERS, -1)
    return tensors[:, 12:].copy().view("<f2").astype(np.float32)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    with recorded_spans() as recorded:
        yield recorded


def transferred(spans: InMemorySpanExporter, name: str) -> list[Any]:
    wanted = names.KV_TRANSFER
    found = [s.attributes or {} for s in spans.get_finished_spans() if s.name == wanted]
    return [seen[name] for seen in found if name in seen]


async def answer(fleet: SmallFleet, link: str, *, of_p: Any, of_d: Any) -> BlobEngine:
    engine = BlobEngine()
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=BlobEngine(), **of_p)
    fleet.worker("d1", Role.DECODE, engine=engine, **of_d)
    await fleet.ready()
    forced = Forced(mode=Mode.REMOTE, link=link)
    await fleet.client.send(a_request("r1", prompt_ids=PROMPT, forced=forced))
    end = await fleet.client.ended("r1")
    assert (end.reason, end.attempt) == (EndReason.LENGTH, 1)
    assert fleet.client.delivered["r1"] == toy_answer(PROMPT, TOKENS)
    await fleet.settled()
    return engine


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8", "fp8", "delta"])
@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("seal", ["off", "required"])
async def test_kv_takes_the_codec_that_both_workers_name(
    codec: str, link: str, seal: str, spans: InMemorySpanExporter
) -> None:
    settings = {"kv_codec": codec, "kv_codecs": ("raw", codec), "kv_seal": seal}
    async with small_fleet() as fleet:
        engine = await answer(fleet, link, of_p=settings, of_d=settings)
    lossless = codec in ("raw", "zstd")
    assert len(engine.errors) == 4
    assert (max(engine.errors) == 0) == lossless
    assert max(engine.errors) < 1
    assert transferred(spans, names.CODEC) == [codec]
    assert transferred(spans, names.SEALED) == [seal == "required" and link == "shm"]
    (raw_bytes,) = transferred(spans, names.RAW_BYTES)
    (n_bytes,) = transferred(spans, names.TRANSFER_BYTES)
    assert (n_bytes == raw_bytes) == (codec == "raw")


async def test_what_only_one_worker_allows_goes_as_it_is(spans: InMemorySpanExporter) -> None:
    async with small_fleet() as fleet:
        engine = await answer(fleet, "tcp", of_p={"kv_codec": "int8"}, of_d={})
    assert max(engine.errors) == 0
    assert transferred(spans, names.CODEC) == ["raw"]


async def test_nothing_is_encoded_or_sealed_by_default(spans: InMemorySpanExporter) -> None:
    async with small_fleet() as fleet:
        await answer(fleet, "tcp", of_p={}, of_d={"kv_codecs": ("raw", "int8")})
    assert transferred(spans, names.CODEC) == ["raw"]
    assert transferred(spans, names.SEALED) == [False]


async def test_a_block_that_cannot_be_opened_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first claim is given another key, as a confused reader would have."""
    claim, spoiled = IncomingTransfers.claim, []

    def claim_with_another_key(self: IncomingTransfers, job: Any, **more: Any) -> Any:
        if not spoiled:
            spoiled.append(job.transfer_id)
            self._ledger.get(job.transfer_id).sealing_key = bytes(32)  # type: ignore[union-attr]
        return claim(self, job, **more)

    monkeypatch.setattr(IncomingTransfers, "claim", claim_with_another_key)
    settings = {"kv_seal": "required"}
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=BlobEngine(), **settings)
        fleet.worker("d1", Role.DECODE, engine=BlobEngine(), **settings)
        await fleet.ready()
        forced = Forced(mode=Mode.REMOTE, link="shm")
        await fleet.client.send(a_request("r1", prompt_ids=PROMPT, forced=forced))
        end = await fleet.client.ended("r1")
        assert (end.reason, end.attempt) == (EndReason.LENGTH, 2)
        assert fleet.client.delivered["r1"] == toy_answer(PROMPT, TOKENS)
        await fleet.settled()
    assert spoiled

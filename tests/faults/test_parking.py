"""Store-and-forward: KV waits at the decode worker until there is a seat for it.

`d1` has one seat, and `r0` sits in it; a gate before its engine says for how long. What comes next
parks, in memory (`dis-cpu`) or on disk (`dis-disk`). Real time: files, threads, real links.
"""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from diptych_bus.memory import MemoryBus
from diptych_contracts.fleet import Role, WorkerLoad
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import Deadlines, Forced, KvPath, Request
from diptych_contracts.sampling import Stopping
from diptych_engine.port import StepInput
from diptych_kvlink.parking import HostStore
from diptych_kvlink.parking_file import DiskStore
from diptych_telemetry import names
from diptych_telemetry.metrics import REGISTRY
from diptych_telemetry.traces import recorded_spans
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

PROMPT = tuple(range(1, 201))
TOKENS = 16
ROOM_BYTES = 64 * 1024
PATIENT = Deadlines(inter_token_s=600.0)
"""For whoever sits behind the gate."""
both_tiers = pytest.mark.parametrize("path", [KvPath.DIS_CPU, KvPath.DIS_DISK])


class Gate:
    """Lets an engine take `free` steps, and further ones once it is open."""

    def __init__(self, free: int = 3) -> None:
        self._free = free
        self._open = Event()

    def __call__(self, _batch: Sequence[StepInput]) -> None:
        self._free -= 1
        if self._free < 0:
            self._open.wait()

    def open(self) -> None:
        self._open.set()


@asynccontextmanager
async def gated_fleet(
    folder: Path, *, gate: Gate | None = None, scheduler: Any = None, **settings: Any
) -> AsyncIterator[tuple[SmallFleet, Gate]]:
    """`p1`, and `d1` with one seat behind the gate; at the end nothing of anything is left."""
    gate = gate or Gate()
    async with small_fleet() as fleet:
        fleet.scheduler(**(scheduler or {}))
        fleet.worker("p1", Role.PREFILL)
        add_decode(fleet, "d1", folder, gate=gate, **settings)
        await fleet.ready()
        try:
            yield fleet, gate
            await fleet.settled()
        finally:
            gate.open()
            assert not os.listdir(folder)
    assert not os.listdir(folder)


def add_decode(
    fleet: SmallFleet, name: str, folder: Path, *, gate: Gate | None = None, **settings: Any
) -> None:
    engine = ToyStepEngine(max_sequences=1, on_step=gate)
    rooms = {"kv_parking_host_bytes": ROOM_BYTES, "kv_parking_disk_bytes": ROOM_BYTES}
    fleet.worker(
        name, Role.DECODE, engine=engine, **(rooms | {"kv_parking_dir": folder} | settings)
    )


def asked(name: str, path: KvPath | None = None, **more: Any) -> Request:
    more = {"stopping": Stopping(max_tokens=TOKENS), "forced": Forced(path=path)} | more
    return a_request(name, prompt_ids=PROMPT, **more)


async def seated(fleet: SmallFleet) -> None:
    """`r0` has the seat, and stays."""
    await fleet.client.send(asked("r0", deadlines=PATIENT))
    await fleet.client.has_tokens("r0", 3)


async def parked(fleet: SmallFleet, path: KvPath, *more_names: str, **more: Any) -> Request:
    """`r1` (and others) wait at `d1`, in that tier and in no transfer slot."""
    requests = [asked(name, path, **more) for name in ("r1", *more_names)]
    for request in requests:
        await fleet.client.send(request)
    await fleet.until_load(lambda: waits(fleet.loads["d1"], path, len(requests)))
    return requests[0]


def waits(load: WorkerLoad, path: KvPath, n: int) -> bool:
    used = held(load, path)
    return load.parked == n and used == n * 4 * SLOT_BYTES and not load.transfer_slots_used


def held(load: WorkerLoad, path: KvPath) -> int:
    kind = "host" if path is KvPath.DIS_CPU else "disk"
    return sum(room.used_bytes for room in load.parking if room.kind == kind)


SLOT_BYTES = ToyStepEngine().spec.layout.slot_bytes


async def answered(fleet: SmallFleet, name: str, *, attempt: int = 1) -> End:
    end = await fleet.client.ended(name)
    assert (end.reason, end.attempt) == (EndReason.LENGTH, attempt)
    assert fleet.client.delivered[name] == toy_answer(PROMPT, TOKENS)
    assert end.report is not None
    return end


def path_of(end: End) -> tuple[str, bool]:
    """By which path, and whether it had to wait for a seat."""
    assert end.report is not None
    return end.report.path, end.report.parked_ms > 0


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"diptych_kv_parked_{name}", labels) or 0.0


@both_tiers
async def test_what_finds_no_seat_parks_until_one_falls_free(path: KvPath, tmp_path: Path) -> None:
    kind = "host" if path is KvPath.DIS_CPU else "disk"
    before = counted("total", parking=kind, outcome="seated")
    with recorded_spans() as spans:
        async with gated_fleet(tmp_path) as (fleet, gate):
            await seated(fleet)
            await parked(fleet, path, "r2")
            assert fleet.client.delivered["r1"] == toy_answer(PROMPT, 1)
            gate.open()
            assert path_of(await answered(fleet, "r0")) == (KvPath.DIS_GPU, False)
            assert path_of(await answered(fleet, "r1")) == (path, True)
            assert path_of(await answered(fleet, "r2")) == (path, True)
    assert counted("total", parking=kind, outcome="seated") - before == 2
    told = [s.attributes or {} for s in spans.get_finished_spans() if s.name == names.KV_PARK]
    assert [seen[names.PARKING] for seen in told] == [kind, kind]


async def test_it_is_chosen_where_nobody_forces_it(tmp_path: Path) -> None:
    async with gated_fleet(tmp_path, kv_parking_disk_bytes=0) as (fleet, gate):
        await seated(fleet)
        await fleet.client.send(asked("r1"))
        await fleet.until_load(lambda: waits(fleet.loads["d1"], KvPath.DIS_CPU, 1))
        gate.open()
        assert path_of(await answered(fleet, "r1")) == (KvPath.DIS_CPU, True)


async def test_without_room_to_park_work_waits_with_its_scheduler(tmp_path: Path) -> None:
    none = {"kv_parking_host_bytes": 0, "kv_parking_disk_bytes": 0}
    async with gated_fleet(tmp_path, **none) as (fleet, gate):
        await seated(fleet)
        await fleet.client.send(asked("r1"))
        async with asyncio.timeout(60):
            while fleet.ledgers["s1"].queued != 1:
                await asyncio.sleep(0.01)
        gate.open()
        assert path_of(await answered(fleet, "r1")) == (KvPath.DIS_GPU, False)


@pytest.mark.parametrize("link", ["shm", "tcp"])
@both_tiers
async def test_a_deployment_type_sends_everything_that_way(
    path: KvPath, link: str, tmp_path: Path
) -> None:
    setting = {"deployment_type": path}
    async with gated_fleet(tmp_path, gate=Gate(10**6), scheduler=setting) as (fleet, _gate):
        for n in range(6):
            prompt = tuple(range(1 + n, 90 + 50 * n))
            request = a_request(f"r{n}", prompt_ids=prompt, forced=Forced(link=link))  # type: ignore[arg-type]
            await fleet.client.send(request)
        for n in range(6):
            end = await fleet.client.ended(f"r{n}")
            assert path_of(end) == (path, True)
            assert end.report is not None
            assert end.report.link == link
            prompt = tuple(range(1 + n, 90 + 50 * n))
            assert fleet.client.delivered[f"r{n}"] == toy_answer(prompt, TOKENS)


@both_tiers
async def test_prefill_may_die_once_its_kv_is_parked(path: KvPath, tmp_path: Path) -> None:
    async with gated_fleet(tmp_path) as (fleet, gate):
        await seated(fleet)
        await parked(fleet, path)
        await fleet.kill("p1")
        gate.open()
        assert path_of(await answered(fleet, "r1")) == (path, True)
        assert (await fleet.closed("r1")).lost_attempts == 0


@both_tiers
async def test_a_cancel_frees_what_is_parked_at_once(path: KvPath, tmp_path: Path) -> None:
    async with gated_fleet(tmp_path) as (fleet, gate):
        await seated(fleet)
        request = await parked(fleet, path)
        fleet.client.cancel(request)
        assert (await fleet.client.ended("r1")).reason is EndReason.CANCELLED
        await fleet.until_load(lambda: fleet.loads["d1"].parked == 0)
        assert held(fleet.loads["d1"], path) == 0
        gate.open()
        await answered(fleet, "r0")


@both_tiers
async def test_a_deadline_ends_what_is_parked(path: KvPath, tmp_path: Path) -> None:
    async with gated_fleet(tmp_path) as (fleet, gate):
        await seated(fleet)
        await parked(fleet, path, deadlines=Deadlines(total_s=5.0))
        assert (await fleet.client.ended("r1")).reason is EndReason.EXPIRED
        await fleet.until_load(lambda: fleet.loads["d1"].parked == 0)
        assert held(fleet.loads["d1"], path) == 0
        gate.open()
        await answered(fleet, "r0")


@both_tiers
async def test_what_is_parked_at_a_worker_that_dies_is_computed_again(
    path: KvPath, tmp_path: Path
) -> None:
    async with gated_fleet(tmp_path) as (fleet, gate):
        await seated(fleet)
        await parked(fleet, path)
        add_decode(fleet, "d2", tmp_path)
        await fleet.ready("d2")
        bus = fleet.lives["d1"].bus
        killing = asyncio.create_task(fleet.kill("d1"))
        await asyncio.wait([bus.closed])
        gate.open()
        await killing
        await answered(fleet, "r0", attempt=2)
        await answered(fleet, "r1", attempt=2)


async def test_a_full_disk_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = counted("faults_total", parking="disk", fault="full")
    async with gated_fleet(tmp_path, gate=Gate(10**6)) as (fleet, _gate):
        monkeypatch.setattr(os, "posix_fallocate", full)
        await fleet.client.send(asked("r1", KvPath.DIS_DISK))
        assert path_of(await answered(fleet, "r1")) == (KvPath.DIS_GPU, False)
    assert counted("faults_total", parking="disk", fault="full") - before == 1


async def test_a_disk_that_fills_up_while_decode_is_full_makes_work_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def full(_store: DiskStore, _slot: int) -> None:
        loop.call_soon_threadsafe(failed.set)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DiskStore, "allocate", full)
    async with gated_fleet(tmp_path, kv_parking_host_bytes=0) as (fleet, gate):
        await seated(fleet)
        await fleet.client.send(asked("r1"))
        async with asyncio.timeout(60):
            await failed.wait()
        gate.open()
        end = await fleet.client.ended("r1")
        assert end.reason is EndReason.LENGTH
        assert fleet.client.delivered["r1"] == toy_answer(PROMPT, TOKENS)
        assert path_of(end) == (KvPath.DIS_GPU, False)
        assert (await fleet.closed("r1")).lost_attempts == 0


async def test_a_disk_that_fails_under_a_copy_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_store: DiskStore, _slot: int, _block: memoryview) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(DiskStore, "write", broken)
    before = counted("faults_total", parking="disk", fault="write")
    async with gated_fleet(tmp_path, gate=Gate(10**6)) as (fleet, _gate):
        await fleet.client.send(asked("r1", KvPath.DIS_DISK))
        assert path_of(await answered(fleet, "r1")) == (KvPath.DIS_DISK, True)
    assert counted("faults_total", parking="disk", fault="write") - before == 1


async def test_a_disk_that_cannot_be_read_back_costs_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failed = DiskStore.read, asyncio.Event()

    def broken(store: DiskStore, slot: int) -> memoryview:
        if failed.is_set():  # Whoever is slow parks there again once the lot is asked again.
            return read(store, slot)
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = counted("faults_total", parking="disk", fault="read")
    async with gated_fleet(tmp_path, gate=Gate(10**6)) as (fleet, _gate):
        monkeypatch.setattr(DiskStore, "read", broken)
        await fleet.client.send(asked("r1", KvPath.DIS_DISK))
        await answered(fleet, "r1", attempt=2)
    assert counted("faults_total", parking="disk", fault="read") - before == 1


@both_tiers
async def test_what_was_altered_while_it_was_parked_is_computed_again(
    path: KvPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte of one block, as a stray write or a rotten disk would."""
    done: list[int] = []

    def in_memory(store: HostStore, slot: int, block: memoryview) -> None:
        kept = bytearray(block)
        kept[9] ^= not done
        done.append(slot)
        store._kept[slot] = bytes(kept)

    to_disk = DiskStore.write

    def on_disk(store: DiskStore, slot: int, block: memoryview) -> None:
        to_disk(store, slot, block)
        assert store._fd is not None
        if not done:
            at = slot * store._stride_bytes + 9
            (was,) = os.pread(store._fd, 1, at)
            os.pwrite(store._fd, bytes([was ^ 1]), at)
        done.append(slot)

    monkeypatch.setattr(HostStore, "write", in_memory)
    monkeypatch.setattr(DiskStore, "write", on_disk)
    kind = "host" if path is KvPath.DIS_CPU else "disk"
    before = counted("total", parking=kind, outcome="corrupt")
    async with gated_fleet(tmp_path) as (fleet, gate):
        await seated(fleet)
        await parked(fleet, path)
        gate.open()
        await answered(fleet, "r0")
        await answered(fleet, "r1", attempt=2)
        assert (await fleet.closed("r1")).lost_attempts == 0
    assert counted("total", parking=kind, outcome="corrupt") - before == 1


@both_tiers
async def test_a_drain_waits_for_what_is_parked(path: KvPath, tmp_path: Path) -> None:
    async with gated_fleet(tmp_path) as (fleet, gate):
        await seated(fleet)
        await parked(fleet, path, "r2")
        life = fleet.lives.pop("d1")
        life.member.stopping.set()
        await fleet.client.send(asked("r3"))
        gate.open()
        async with asyncio.timeout(60):
            await life.task
        for name in ("r0", "r1", "r2"):
            await answered(fleet, name)
        add_decode(fleet, "d2", tmp_path)
        end = await fleet.client.ended("r3")
        assert end.reason is EndReason.LENGTH


async def test_a_drain_that_is_cut_off_hands_back_what_is_parked(tmp_path: Path) -> None:
    async with gated_fleet(tmp_path, gate=Gate(10**6), drain_s=0.0) as (fleet, _gate):
        engine = fleet.engines["d1"]
        assert isinstance(engine, ToyStepEngine)
        engine.step_s = 0.002
        long = asked("r0", deadlines=PATIENT, stopping=Stopping(max_tokens=3500))
        await fleet.client.send(long)
        await fleet.client.has_tokens("r0", 3)
        await parked(fleet, KvPath.DIS_DISK)
        add_decode(fleet, "d2", tmp_path)
        await fleet.ready("d2")
        life = fleet.lives.pop("d1")
        life.member.stopping.set()
        async with asyncio.timeout(60):
            await life.task
        fleet.client.cancel(long)
        assert (await fleet.client.ended("r0")).reason is EndReason.CANCELLED
        await answered(fleet, "r1", attempt=2)
        assert (await fleet.closed("r1")).lost_attempts == 0


async def test_a_worker_whose_engine_is_put_right_serves_the_line_in_order(tmp_path: Path) -> None:
    """Whoever parked first is answered first, and nobody who comes straight overtakes them."""
    order: list[str] = []
    async with gated_fleet(tmp_path) as (fleet, gate):
        append = MemoryBus.append

        def noted(bus: MemoryBus, gateway: Any, entry: Any) -> None:
            if getattr(entry, "phase", "") == "decode":
                order.append(entry.request_id)
            append(bus, gateway, entry)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryBus, "append", noted)
            await seated(fleet)
            await parked(fleet, KvPath.DIS_CPU)
            for n, name in enumerate(("r2", "r3"), start=2):
                await fleet.client.send(asked(name, KvPath.DIS_CPU))
                await fleet.until_load(lambda n=n: waits(fleet.loads["d1"], KvPath.DIS_CPU, n))  # type: ignore[misc]
            gate.open()
            for name in ("r0", "r1", "r2", "r3"):
                await answered(fleet, name)
        assert order == ["r0", "r1", "r2", "r3"]

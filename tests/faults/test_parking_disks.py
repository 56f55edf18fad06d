"""Disks to park on that hang or turn read-only, and tickets to park that come late or twice."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from diptych_contracts.errors import Refused
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation, transfer_id
from diptych_contracts.jobs import DecodeJob
from diptych_contracts.journal import End, EndReason, Report
from diptych_contracts.requests import Forced, KvPath, Mode
from diptych_contracts.sampling import Stopping
from diptych_contracts.transfers import Reserve, ReserveAnswer, ReserveRefused, Ticket
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.links import LinkSettings
from diptych_kvlink.parking import HostStore, Lot
from diptych_kvlink.parking_file import DiskStore
from diptych_policy.job_admission import JobAdmission
from diptych_testkit.builders import a_generation, a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer
from diptych_worker import parking
from diptych_worker.held_prefixes import HeldPrefixes
from diptych_worker.metering import WorkerMetrics
from diptych_worker.parking import Parking
from diptych_worker.taking_over import TakeOver

PROMPT = tuple(range(1, 201))
TOKENS = 8
ROOM_BYTES = 64 * 1024
SPEC = ToyStepEngine().spec
SLOT_BYTES = SPEC.layout.slot_bytes
WAIT_S = 60.0


class Hung:
    """A call that does not return until it is let go."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()

    def __call__(self, *_args: object) -> None:
        self.begun.set()
        self._go.wait()

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def hung() -> Iterator[Hung]:
    made = Hung()
    yield made
    made.let_go()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL)
        rooms = {"kv_parking_disk_bytes": ROOM_BYTES, "kv_parking_dir": tmp_path / "parking"}
        fleet.worker("d1", Role.DECODE, engine=ToyStepEngine(), **rooms)
        await fleet.ready()
        yield fleet
        assert fleet.crashes == []


async def ask(fleet: SmallFleet, name: str, path: KvPath | None = KvPath.DIS_DISK) -> None:
    stopping = Stopping(max_tokens=TOKENS)
    forced = Forced(path=path)
    await fleet.client.send(a_request(name, prompt_ids=PROMPT, stopping=stopping, forced=forced))


async def answered(fleet: SmallFleet, name: str) -> End:
    end = await fleet.client.ended(name)
    assert end.reason is EndReason.LENGTH
    assert fleet.client.delivered[name] == toy_answer(PROMPT, TOKENS)
    return end


async def until_free(fleet: SmallFleet) -> None:
    def free() -> bool:
        (room,) = fleet.loads["d1"].parking
        return room.total_bytes > 0 and room.used_bytes == 0

    await fleet.until_load(free)


async def test_a_disk_that_hangs_when_room_is_asked_for_keeps_nobody(
    fleet: SmallFleet, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked on the event loop: every answer of that worker stood still."""
    monkeypatch.setattr(parking, "ROOM_S", 0.5)
    monkeypatch.setattr(os, "posix_fallocate", hung)
    await ask(fleet, "r1")
    await ask(fleet, "r2", None)
    await answered(fleet, "r2")
    end = await answered(fleet, "r1")
    assert end.report is not None
    assert end.report.path == KvPath.DIS_GPU
    assert hung.begun.is_set()
    await fleet.until_load(lambda: fleet.loads["d1"].parking[0].total_bytes == 0)
    hung.let_go()
    await until_free(fleet)


async def test_a_disk_that_hangs_under_a_copy_loses_nothing(
    fleet: SmallFleet, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "STUCK_S", 0.5)
    monkeypatch.setattr(DiskStore, "write", hung)
    await ask(fleet, "r1")
    assert (await answered(fleet, "r1")).attempt == 1
    assert hung.begun.is_set()
    hung.let_go()
    await until_free(fleet)


async def test_a_disk_that_hangs_under_a_read_costs_an_attempt(
    fleet: SmallFleet, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "STUCK_S", 0.5)
    monkeypatch.setattr(DiskStore, "read", hung)
    await ask(fleet, "r1")
    assert (await answered(fleet, "r1")).attempt == 2
    hung.let_go()
    await until_free(fleet)


async def test_a_cancel_does_not_wait_for_a_disk_that_hangs(
    fleet: SmallFleet, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "STUCK_S", 0.5)
    monkeypatch.setattr(DiskStore, "write", hung)
    request = a_request("r1", prompt_ids=PROMPT, forced=Forced(path=KvPath.DIS_DISK))
    await fleet.client.send(request)
    assert await asyncio.to_thread(hung.begun.wait, WAIT_S)
    fleet.client.cancel(request)
    assert (await fleet.client.ended("r1")).reason is EndReason.CANCELLED
    await fleet.until_load(lambda: fleet.loads["d1"].parked == 0)
    hung.let_go()
    await until_free(fleet)


async def test_a_disk_that_turns_read_only_ends_nothing(
    fleet: SmallFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was parked is read back; that the file cannot be cut concerns nobody."""

    def read_only(_fd: int, _n_bytes: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "ftruncate", read_only)
    for name in ("r1", "r2"):
        await ask(fleet, name)
        end = await answered(fleet, name)
        assert end.report is not None
        assert (end.report.path, end.attempt) == (KvPath.DIS_DISK, 1)
    await until_free(fleet)


class Desk:
    """A decode worker's tickets, with both lots and nobody behind them."""

    def __init__(self, folder: Path) -> None:
        disk = folder / "parking"
        disk.mkdir(mode=0o700)
        stores = {"host": HostStore(), "disk": DiskStore(disk, SLOT_BYTES)}
        self.lots = {
            kind: Lot(
                kind,
                store,
                total_bytes=8 * SLOT_BYTES,
                slot_bytes=SLOT_BYTES,
                clock=time.monotonic,
            )
            for kind, store in stores.items()
        }
        self.admission = JobAdmission(max_sequences=4, kv_tokens=4096)
        self.incoming = IncomingTransfers(
            SPEC.layout,
            slots=16,
            lease_s=60.0,
            name="d1",
            links=LinkSettings(kinds=("shm",), directory=folder / "shm"),
            fingerprint=SPEC.fingerprint,
        )
        metrics = WorkerMetrics("toy", SPEC)
        self.parking = Parking(
            self.lots,
            self.admission,
            model_base=SPEC.fingerprint.base,
            metrics=metrics,
            now_s=time.monotonic,
        )
        self.desk = TakeOver(
            self.incoming,
            self.admission,
            SPEC,
            parking=self.parking,
            held=HeldPrefixes(None, SPEC),
            metrics=metrics,
            now_s=time.monotonic,
        )

    async def ask(self, where: str) -> ReserveAnswer:
        generation = a_generation(prompt_ids=PROMPT)
        reserve = Reserve(
            transfer_id=transfer_id(generation.request_id, generation.attempt),
            generation=generation,
            prefill_worker=Incarnation("p1"),
            link="shm",
            layout=SPEC.layout,
            fingerprint=SPEC.fingerprint,
            parking=where,
        )
        await self.desk.make_room(reserve)
        return self.desk.reserve(reserve)

    @property
    def held(self) -> dict[str, int]:
        for lot in self.lots.values():
            lot.check()
        return {kind: lot.room.used_bytes // SLOT_BYTES for kind, lot in self.lots.items()}


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.parking.close()
    made.incoming.close()


async def test_a_ticket_that_is_asked_for_anew_elsewhere_has_room_there_only(desk: Desk) -> None:
    for where, held in (
        ("host", {"host": 4, "disk": 0}),
        ("disk", {"host": 0, "disk": 4}),
        ("host", {"host": 4, "disk": 0}),
    ):
        assert isinstance(await desk.ask(where), Ticket)
        assert desk.held == held
    desk.desk.cancel(a_generation().request_id, 1)
    assert desk.held == {"host": 0, "disk": 0}
    assert len(desk.admission) == 0


async def test_a_late_copy_of_what_has_ended_takes_no_room(desk: Desk) -> None:
    """It was given room that nobody ever gave back."""
    generation = a_generation()
    ticket = await desk.ask("host")
    assert isinstance(ticket, Ticket)
    desk.incoming.release(ticket.transfer_id)
    desk.desk._promised.clear()
    desk.parking.free(ticket.transfer_id)
    desk.admission.leave(generation.request_id, generation.attempt)
    for where in ("host", "disk", ""):
        assert isinstance(await desk.ask(where), ReserveRefused)
        assert desk.held == {"host": 0, "disk": 0}


async def test_a_job_whose_room_was_given_back_is_refused(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended its worker: `KeyError`."""
    ticket = await desk.ask("host")
    assert isinstance(ticket, Ticket)
    assert isinstance(await desk.ask("nowhere"), ReserveRefused)
    assert desk.held == {"host": 0, "disk": 0}
    monkeypatch.setattr(desk.incoming, "claim", lambda _job, **_more: ())
    job = DecodeJob(
        generation=a_generation(prompt_ids=PROMPT),
        prefill_worker=Incarnation("p1"),
        transfer_id=ticket.transfer_id,
        first_ids=(1,),
        blocks=(),
        seal=ticket.seal,
        report=Report(mode=Mode.REMOTE),
    )
    with pytest.raises(Refused, match="was given back"):
        desk.desk.claim(job)
    assert desk.incoming.slots_used == desk.incoming.slots_quarantined

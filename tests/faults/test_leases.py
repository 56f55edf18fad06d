"""KV tickets nobody comes for: swept without traffic; while they fill a worker it is not ready."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from diptych_contracts import subjects
from diptych_contracts.cards import Fingerprint
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.jobs import (
    Cancel,
    CancelDone,
    GenerateJob,
    JobAnswer,
    PrefillJob,
    RefusalReason,
)
from diptych_contracts.sampling import Stopping
from diptych_contracts.transfers import (
    Release,
    Released,
    Reserve,
    ReserveAnswer,
    ReserveRefused,
    Ticket,
)
from diptych_testkit.builders import a_generation
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine

pytestmark = pytest.mark.virtual_time

WRITER = Incarnation("p-test-1")
PROMPT = tuple(range(1, 201))
"""Four blocks."""


class Reader:
    """A decode worker, asked by hand."""

    def __init__(self, fleet: SmallFleet) -> None:
        self._bus = fleet.bus
        self._me = fleet.incarnation("d1")
        self._vitals = fleet.lives["d1"].member.vitals

    async def reserve(
        self, request: str, *, attempt: int = 1, max_tokens: int = 16
    ) -> ReserveAnswer:
        spec = ToyStepEngine().spec
        stopping = Stopping(max_tokens=max_tokens)
        wanted = Reserve(
            transfer_id=transfer_id(RequestId(request), attempt),
            generation=a_generation(request, attempt, prompt_ids=PROMPT, stopping=stopping),
            prefill_worker=WRITER,
            link="shm",
            layout=spec.layout,
            fingerprint=Fingerprint(base="toy", weights="none"),
        )
        answer: ReserveAnswer = await self._bus.request(
            subjects.kv(self._me, "reserve"), wanted, ReserveAnswer, timeout_s=2.0
        )
        return answer

    async def release(self, request: str, attempt: int = 1) -> None:
        message = Release(transfer_id=transfer_id(RequestId(request), attempt))
        await self._bus.request(subjects.kv(self._me, "release"), message, Released, timeout_s=2.0)

    async def snapshot(self, ended: int = 0) -> KvSnapshot:
        answer: KvSnapshot = await self._bus.request(
            subjects.control(self._me), KvAsk(ended=ended), KvSnapshot, timeout_s=2.0
        )
        return answer

    async def until_ready(self, ready: bool, timeout_s: float = 10.0) -> str:
        """Wait for the worker's readiness; gives its reason."""
        async with asyncio.timeout(timeout_s):
            while self._vitals.readiness.ready is not ready:
                await asyncio.sleep(0.02)
        return self._vitals.readiness.detail


@asynccontextmanager
async def a_reader(**settings: Any) -> AsyncIterator[tuple[SmallFleet, Reader]]:
    async with small_fleet() as fleet:
        fleet.worker("d1", Role.DECODE, **settings)
        await fleet.ready()
        yield fleet, Reader(fleet)
        await fleet.settled()


async def test_a_ticket_nobody_comes_for_is_swept_without_any_traffic() -> None:
    async with a_reader(lease_s=0.4) as (fleet, reader):
        assert isinstance(await reader.reserve("r1"), Ticket)
        (held,) = (await reader.snapshot()).transfers
        assert (held.state, held.writer, held.link) == ("reserved", WRITER, "shm")
        assert held.n_bytes > 0
        assert 0 < held.left_ms <= 400
        await fleet.settled()
        snapshot = await reader.snapshot(ended=1)
        assert (snapshot.slots_used, len(snapshot.transfers)) == (0, 1)
        (over,) = snapshot.transfers
        assert (over.state, over.writer, over.link) == ("expired", WRITER, "shm")
        assert over.n_bytes == held.n_bytes
        assert over.reason == "deadline of state reserved passed"


async def test_late_and_repeated_messages_about_a_ticket_change_nothing() -> None:
    async with a_reader(lease_s=0.4) as (fleet, reader):
        first = await reader.reserve("r1")
        again = await reader.reserve("r1")
        assert isinstance(first, Ticket)
        assert isinstance(again, Ticket)
        assert again.slots == first.slots
        assert (await reader.snapshot()).slots_used == len(first.slots)
        await fleet.settled()
        late = await reader.reserve("r1")
        assert isinstance(late, ReserveRefused)
        assert late.reason is RefusalReason.EXPIRED
        await reader.release("r1")
        await reader.release("r1")
        await reader.release("never-there")
        assert (await reader.snapshot()).slots_used == 0
        fresh = await reader.reserve("r1", attempt=2)
        assert isinstance(fresh, Ticket)
        await reader.release("r1")  # of the first attempt, late
        assert (await reader.snapshot()).slots_used == len(fresh.slots)
        await reader.release("r1", attempt=2)


@pytest.mark.parametrize("kind", ["generate", "prefill"])
async def test_a_cancel_on_the_heels_of_its_job_leaves_nothing_behind(kind: str) -> None:
    """A task that is cancelled before its first step runs no `finally`: 17 of 3,452 soaked
    requests whose clients left before the first token kept their seats and slots."""
    async with small_fleet() as fleet:
        role = Role.PREFILL if kind == "prefill" else Role.DECODE
        fleet.worker("w1", role)
        await fleet.ready()
        worker = fleet.incarnation("w1")

        async def job_then_cancel(number: int) -> None:
            generation = a_generation(f"r{number}", prompt_ids=PROMPT)
            job = (
                GenerateJob(generation=generation)
                if kind == "generate"
                else PrefillJob(generation=generation, decode_worker=worker, link="shm")
            )
            cancel = Cancel(request_id=generation.request_id, attempt=1)
            async with asyncio.timeout(60):
                _, done = await asyncio.gather(
                    fleet.bus.request(subjects.job(worker), job, JobAnswer, timeout_s=2.0),
                    fleet.bus.request(subjects.cancel(worker), cancel, CancelDone, timeout_s=2.0),
                )
            assert done == CancelDone(request_id=generation.request_id, attempt=1)

        for number in range(8):
            await job_then_cancel(number)
        await fleet.settled()


@pytest.mark.parametrize(
    ("settings", "max_tokens", "says"),
    [
        ({"transfer_slots": 4}, 16, "all 4 KV transfer slots are in use (0 in quarantine)"),
        ({}, 16_384 - 200, "needs 64 KV cells, 0 of 16384 are free"),
    ],
)
async def test_readiness_turns_false_on_exhaustion_says_why_and_turns_true_again(
    settings: dict[str, Any], max_tokens: int, says: str
) -> None:
    async with a_reader(lease_s=30.0, **settings) as (_, reader):
        assert isinstance(await reader.reserve("r1", max_tokens=max_tokens), Ticket)
        assert isinstance(await reader.reserve("r2"), ReserveRefused)
        assert await reader.until_ready(False) == says
        await reader.release("r1")
        await reader.until_ready(True)
        assert isinstance(await reader.reserve("r2"), Ticket)
        await reader.release("r2")

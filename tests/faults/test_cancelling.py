"""A cancel at every stage: the engine stops, and both sides are free, within 100 ms or one chunk.

Times run from the mark in the record, which is what a gateway writes when its client leaves, to the
moment at which no engine holds a cell and no worker a slot or seat.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import pytest

from diptych_bus.port import Delivery
from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.fleet import Role, WorkerLoad
from diptych_contracts.jobs import DecodeJob, GenerateJob, PrefillJob
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_engine.port import StepInput
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine

log = logging.getLogger(__name__)

pytestmark = pytest.mark.virtual_time

WITHIN_S = 0.1


class Watched:
    """Two toy engines that take their time, and what they hold."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.steps = 0
        self.prefill = ToyStepEngine(on_step=self._count, step_s=step_s)
        self.decode = ToyStepEngine(on_step=self._count, step_s=step_s)

    def _count(self, _batch: Sequence[StepInput]) -> None:
        self.steps += 1

    @property
    def cells(self) -> int:
        return self.prefill.cells_used + self.decode.cells_used


async def started(fleet: SmallFleet, step_s: float = 0.005) -> Watched:
    watched = Watched(step_s)
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=watched.prefill, prefix_cache=False)
    fleet.worker("d1", Role.DECODE, engine=watched.decode, prefix_cache=False)
    await fleet.ready()
    return watched


def prompt(tokens: int) -> tuple[int, ...]:
    return tuple(1 + number % 900 for number in range(tokens))


def request(prompt_tokens: int = 100, max_tokens: int = 1500) -> Request:
    return a_request(
        "r1",
        prompt_ids=prompt(prompt_tokens),
        stopping=Stopping(max_tokens=max_tokens),
    )


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def mark(fleet: SmallFleet) -> None:
    """Have the request cancelled, as a gateway does."""
    records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    async with asyncio.timeout(60):
        while (kept := await records.get("r1")) is None:
            await asyncio.sleep(0.001)
    cancelling = msgspec.structs.replace(kept.value, state=RecordState.CANCELLING)
    await records.update("r1", cancelling, kept.revision)


async def slots(fleet: SmallFleet, name: str) -> int:
    subject = subjects.control(fleet.incarnation(name))
    snapshot: KvSnapshot = await fleet.bus.request(subject, KvAsk(), KvSnapshot, timeout_s=60)
    return snapshot.slots_used


async def freed(fleet: SmallFleet, watched: Watched) -> float:
    """Cancel; gives the seconds until nothing is held."""
    began_s = now_s()
    await mark(fleet)
    async with asyncio.timeout(60):
        while watched.cells or await slots(fleet, "d1"):
            await asyncio.sleep(0.001)
    took_s = now_s() - began_s
    end = await fleet.client.ended("r1", timeout_s=5)
    assert end.reason is EndReason.CANCELLED
    steps = watched.steps
    await fleet.settled(timeout_s=5)
    await asyncio.sleep(3 * watched.step_s)
    assert watched.steps == steps, "nobody computes any more"
    return took_s


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


async def test_queued() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await fleet.ready()
        await fleet.client.send(request())
        began_s = now_s()
        await mark(fleet)
        end = await fleet.client.ended("r1", timeout_s=5)
        took_s = now_s() - began_s
        assert end.reason is EndReason.CANCELLED
        fleet.worker("d1", Role.DECODE)
        await fleet.ready("d1")
        await fleet.settled()
        assert fleet.client.delivered["r1"] == []
        log.info("cancelled in %.1f ms", took_s * 1000)
        assert took_s < WITHIN_S


@pytest.mark.parametrize("step_s", [0.005, 0.4], ids=["short-chunks", "long-chunks"])
async def test_prefilling(step_s: float) -> None:
    """Before the first token: the engine ends the chunk it is at, and begins no other."""
    async with small_fleet() as fleet:
        watched = await started(fleet, step_s)
        await fleet.client.send(request(prompt_tokens=2400))
        await until(lambda: watched.steps >= 2)
        took_s = await freed(fleet, watched)
        assert fleet.client.delivered["r1"] == []
        log.info("cancelled in %.1f ms", took_s * 1000)
        assert took_s < WITHIN_S + step_s


async def test_waiting_for_the_prefill_engine() -> None:
    """It has a ticket and a seat at the decode worker, and no step of its own yet."""
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(step_s=0.3))
        fleet.worker("d1", Role.DECODE, engine=ToyStepEngine())
        await fleet.ready()
        await fleet.client.send(a_request("r0", prompt_ids=prompt(3000)))
        await fleet.until_reserved("d1")
        before = await slots(fleet, "d1")
        await fleet.client.send(request(prompt_tokens=640))
        async with asyncio.timeout(60):
            while await slots(fleet, "d1") == before:
                await asyncio.sleep(0.005)
        began_s = now_s()
        await mark(fleet)
        async with asyncio.timeout(60):
            while await slots(fleet, "d1") != before:
                await asyncio.sleep(0.001)
        took_s = now_s() - began_s
        assert (await fleet.client.ended("r1")).reason is EndReason.CANCELLED
        log.info("cancelled in %.1f ms", took_s * 1000)
        assert took_s < WITHIN_S + 0.3
        assert (await fleet.client.ended("r0")).reason is EndReason.LENGTH
        await fleet.settled()


async def test_transferring() -> None:
    """Between prefill's end and the decode worker's word: the job on its way is held up."""
    async with small_fleet() as fleet:
        watched = await started(fleet)
        handed_over = asyncio.Event()
        send = fleet.lives["p1"].bus.request

        async def held_up(subject: str, message: object, reply: object, **limits: float) -> object:
            if isinstance(message, DecodeJob):
                handed_over.set()
                await asyncio.sleep(60)
            return await send(subject, message, reply, **limits)  # type: ignore[arg-type]

        fleet.lives["p1"].bus.request = held_up  # type: ignore[method-assign]
        await fleet.client.send(request())
        async with asyncio.timeout(60):
            await handed_over.wait()
        assert await slots(fleet, "d1") > 0
        took_s = await freed(fleet, watched)
        log.info("cancelled in %.1f ms", took_s * 1000)
        assert took_s < WITHIN_S


async def test_decoding() -> None:
    async with small_fleet() as fleet:
        watched = await started(fleet)
        await fleet.client.send(request())
        await fleet.client.has_tokens("r1", 5)
        took_s = await freed(fleet, watched)
        log.info("cancelled in %.1f ms", took_s * 1000)
        assert took_s < WITHIN_S


async def test_before_there_is_a_record() -> None:
    """The gateway's mark comes first: whoever pulls the request cancels it and sends no job."""
    async with small_fleet() as fleet:
        jobs: list[object] = []
        loads: list[WorkerLoad] = []

        def note(delivery: Delivery) -> None:
            jobs.append(delivery.decode(PrefillJob | GenerateJob | DecodeJob))

        await fleet.bus.subscribe("job.*", note)
        await fleet.bus.subscribe(subjects.LOADS, lambda d: loads.append(d.decode(WorkerLoad)))
        sent = request()
        await fleet.client.send(sent)
        fresh = RequestRecord(
            request_id=sent.request_id,
            owner=sent.gateway,
            gateway=sent.gateway,
            state=RecordState.CANCELLING,
            deadline_unix_ms=2**52,
        )
        await fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).create("r1", fresh)
        await started(fleet)
        assert (await fleet.client.ended("r1")).reason is EndReason.CANCELLED
        await fleet.closed("r1")
        await fleet.settled()
        assert jobs == []
        assert loads

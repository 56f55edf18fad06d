"""Prompts that requests and jobs only name: served, recovered, refused, deleted.

A short prompt by reference goes the way of a long one; two tests send a really long one.
"""

import asyncio

import pytest

from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import Forced, Mode, RecordState, Request, RequestRecord
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import PROMPTS, REQUEST_RECORDS
from diptych_testkit.builders import a_request, by_reference
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

pytestmark = pytest.mark.virtual_time

PROMPT = tuple(range(1, 301))
LONG = tuple(n % 999 + 1 for n in range(70_000))


def slow_engine(step_s: float = 0.004) -> ToyStepEngine:
    return ToyStepEngine(step_s=step_s)


def large_engine() -> ToyStepEngine:
    return ToyStepEngine(context_tokens=80_000, kv_tokens=100_000)


async def a_pair(fleet: SmallFleet) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=slow_engine())
    fleet.worker("d1", Role.DECODE, engine=slow_engine())
    await fleet.ready()


async def send(fleet: SmallFleet, request: Request) -> None:
    """As a gateway does: the prompt first."""
    named, data = by_reference(request)
    await fleet.bus.put_object(PROMPTS, named.request_id, data)
    await fleet.client.send(named)


async def is_answered(
    fleet: SmallFleet, prompt: tuple[int, ...] = PROMPT, *, tokens: int = 16
) -> End:
    end = await fleet.client.ended("r1")
    assert (end.reason, end.tokens) == (EndReason.LENGTH, tokens), end.detail
    assert fleet.client.delivered["r1"] == toy_answer(prompt, tokens)
    await fleet.settled()
    await nothing_is_kept(fleet)
    return end


async def nothing_is_kept(fleet: SmallFleet) -> None:
    async with asyncio.timeout(60):
        while await fleet.bus.object_names(PROMPTS):
            await asyncio.sleep(0.01)


class Fetches:
    """Counts, and may hold up, what a worker fetches."""

    def __init__(self, fleet: SmallFleet, worker: str, *, wait: asyncio.Event | None = None):
        self.count = 0
        self._wait = wait
        self._bus = fleet.lives[worker].bus
        self._get = self._bus.get_object
        self._bus.get_object = self._counted  # type: ignore[method-assign]

    async def _counted(self, bucket: str, name: str) -> bytes | None:
        self.count += 1
        if self._wait is not None:
            await self._wait.wait()
        return await self._get(bucket, name)


@pytest.mark.parametrize("mode", list(Mode))
async def test_both_modes_serve_it_and_delete_it(mode: Mode) -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        fetches = {worker: Fetches(fleet, worker) for worker in ("p1", "d1")}
        await send(fleet, a_request("r1", prompt_ids=PROMPT, forced=Forced(mode=mode)))
        end = await is_answered(fleet)
        assert end.report is not None
        assert end.report.mode == mode
        assert fetches["d1"].count == 1
        assert fetches["p1"].count == (mode is Mode.REMOTE)


@pytest.mark.parametrize("victim", ["d1", "p1"])
async def test_a_worker_that_dies_mid_stream_costs_no_token(victim: str) -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        at_p1 = Fetches(fleet, "p1")
        await send(fleet, a_request("r1", prompt_ids=PROMPT, stopping=Stopping(max_tokens=200)))
        await fleet.client.has_tokens("r1", 10)
        fleet.worker("d2", Role.DECODE, engine=slow_engine())
        await fleet.ready("d2")
        at_d2 = Fetches(fleet, "d2")
        await fleet.kill(victim)
        await is_answered(fleet, tokens=200)
        if victim == "d1":
            assert (at_p1.count, at_d2.count) == (1, 1), "the prefill worker still had it"


async def test_an_adopter_serves_it_on_through_the_next_death() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await send(fleet, a_request("r1", prompt_ids=PROMPT, stopping=Stopping(max_tokens=900)))
        await fleet.client.has_tokens("r1", 10)
        await fleet.kill("s1")
        fleet.scheduler("s2")
        fleet.worker("d2", Role.DECODE, engine=slow_engine())
        await fleet.ready("d2", "s2")
        await adopted(fleet, fleet.incarnation("s2"))
        await fleet.kill("d1")
        end = await is_answered(fleet, tokens=900)
        assert end.attempt == 2


async def adopted(fleet: SmallFleet, owner: Incarnation) -> None:
    records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    async with asyncio.timeout(60):
        while (kept := await records.get("r1")) is None or kept.value.owner != owner:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", list(Mode))
async def test_an_accepted_request_whose_prompt_is_gone_fails_and_says_so(mode: Mode) -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        request, _ = by_reference(a_request("r1", prompt_ids=PROMPT, forced=Forced(mode=mode)))
        await fleet.client.send(request)
        end = await fleet.client.ended("r1", timeout_s=5.0)
        assert (end.reason, end.attempt) == (EndReason.FAILED, 1)
        assert "the prompt of the request is gone" in end.detail
        await fleet.settled()


async def test_an_altered_prompt_is_never_computed() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        request, data = by_reference(a_request("r1", prompt_ids=PROMPT))
        await fleet.bus.put_object(PROMPTS, "r1", data[:-2] + b"\x07\x00")
        await fleet.client.send(request)
        end = await fleet.client.ended("r1", timeout_s=10.0)
        assert end.reason is EndReason.FAILED
        assert "Unverified" in end.detail
        assert fleet.client.delivered["r1"] == []
        await fleet.settled()
        assert await fleet.bus.object_names(PROMPTS) == ["r1"], "to be looked into"


@pytest.mark.parametrize(
    ("mode", "waiting"), [(Mode.LOCAL, "d1"), (Mode.REMOTE, "p1"), (Mode.REMOTE, "d1")]
)
async def test_a_cancel_does_not_wait_for_the_prompt(mode: Mode, waiting: str) -> None:
    never = asyncio.Event()
    async with small_fleet() as fleet:
        await a_pair(fleet)
        fetches = Fetches(fleet, waiting, wait=never)
        await send(fleet, a_request("r1", prompt_ids=PROMPT, forced=Forced(mode=mode)))
        async with asyncio.timeout(60):
            while not fetches.count:
                await asyncio.sleep(0.01)
        await cancel(fleet)
        end = await fleet.client.ended("r1", timeout_s=2.0)
        assert end.reason is EndReason.CANCELLED
        await fleet.settled(timeout_s=2.0)


async def cancel(fleet: SmallFleet) -> None:
    records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    kept = await records.get("r1")
    assert kept is not None
    record = kept.value
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    marked = RequestRecord(**(values | {"state": RecordState.CANCELLING}))
    await records.update("r1", marked, kept.revision)


async def test_what_a_dead_gateway_stored_without_its_request_is_swept() -> None:
    async with small_fleet() as fleet:
        await fleet.bus.put_object(PROMPTS, "r0", b"orphan")
        fleet.scheduler(sweep_s=0.05)
        fleet.worker("d1", Role.DECODE, engine=slow_engine())
        await fleet.ready()
        await send(fleet, a_request("r1", prompt_ids=PROMPT, stopping=Stopping(max_tokens=100)))
        async with asyncio.timeout(60):
            while "r0" in await fleet.bus.object_names(PROMPTS):
                await asyncio.sleep(0.01)
        await is_answered(fleet, tokens=100)


async def test_what_no_scheduler_has_taken_yet_is_not_swept() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler("s1", sweep_s=0.05, max_queued=1)
        await fleet.ready()
        await fleet.client.send(a_request("first"))
        await send(fleet, a_request("r1", prompt_ids=PROMPT))
        await asyncio.sleep(0.5)  # ten looks, while nobody serves and s1 is full
        assert await fleet.bus.object_names(PROMPTS) == ["r1"]
        fleet.worker("d1", Role.DECODE)
        await is_answered(fleet)


@pytest.mark.parametrize(("slots", "mode"), [(1200, Mode.REMOTE), (1000, Mode.LOCAL)])
async def test_seventy_thousand_tokens_go_where_they_fit(slots: int, mode: Mode) -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=large_engine(), transfer_slots=slots)
        fleet.worker("d1", Role.DECODE, engine=large_engine(), transfer_slots=slots)
        await fleet.ready()
        await send(fleet, a_request("r1", prompt_ids=LONG))
        end = await is_answered(fleet, LONG)
        assert end.report is not None
        assert end.report.mode == mode

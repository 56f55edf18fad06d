"""A member that is asked to stop: nothing is lost or counted, and it says when it is done."""

import asyncio
from typing import Any

import pytest

from diptych_contracts import subjects
from diptych_contracts.events import LifeCycleEvent, MemberDrained
from diptych_contracts.fleet import Role
from diptych_contracts.jobs import GenerateJob, JobAnswer, JobRefused, RefusalReason
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import EVENTS
from diptych_testkit.builders import a_generation, a_request
from diptych_testkit.small_fleet import Life, SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

pytestmark = pytest.mark.virtual_time

PROMPT = tuple(range(1, 101))
TOKENS = 100


def slow_engine(step_s: float = 0.004) -> ToyStepEngine:
    return ToyStepEngine(step_s=step_s)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def a_fleet(fleet: SmallFleet, *decodes: str, **settings: Any) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=slow_engine())
    for name in decodes:
        fleet.worker(name, Role.DECODE, engine=slow_engine(), **settings)
    await fleet.ready()


async def send(fleet: SmallFleet, *names: str, tokens: int = TOKENS, **more: Any) -> None:
    for name in names:
        stopping = Stopping(max_tokens=tokens)
        await fleet.client.send(a_request(name, prompt_ids=PROMPT, stopping=stopping, **more))


async def are_answered(fleet: SmallFleet, *names: str, tokens: int = TOKENS) -> None:
    for name in names:
        end = await fleet.client.ended(name)
        assert end.reason is EndReason.LENGTH, end
        assert fleet.client.delivered[name] == toy_answer(PROMPT, tokens)
        assert (await fleet.closed(name)).lost_attempts == 0


async def leaves(fleet: SmallFleet, name: str, timeout_s: float = 10.0) -> list[str]:
    """Ask a member to stop and wait until it is gone; gives what its readiness said meanwhile."""
    life = fleet.lives.pop(name)
    said = []
    life.member.stopping.set()
    async with asyncio.timeout(timeout_s):
        while not life.task.done():
            await asyncio.sleep(0.005)
            detail = life.member.vitals.readiness.detail
            if not said or said[-1] != detail:
                said.append(detail)
    life.task.result()
    return said


async def told(fleet: SmallFleet, life: Life | str) -> MemberDrained:
    """The event of a member's drain."""
    wanted = fleet.incarnation(life) if isinstance(life, str) else life.member.incarnation
    for seq in range(1, 200):
        stored = await fleet.bus.stored(EVENTS.name, seq)
        if stored is None:
            continue
        event: LifeCycleEvent = stored.decode(LifeCycleEvent)
        if isinstance(event, MemberDrained) and event.member == wanted:
            return event
    raise AssertionError(f"{wanted} did not say that it has drained")


@pytest.mark.parametrize("victim", ["d1", "p1"])
async def test_a_worker_finishes_what_it_has_and_leaves(victim: str) -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "d1", "d2")
        names = [f"r{number}" for number in range(6)]
        await send(fleet, *names)
        await fleet.client.has_tokens("r0", 5)
        said = await leaves(fleet, victim)
        await are_answered(fleet, *names)
        assert said[-1] == "drained"
        event = await told(fleet, victim)
        assert event.left == 0
        assert (victim, event.took_ms > 50) in (("d1", True), ("p1", True), ("p1", False))
        await fleet.settled()


async def test_a_draining_worker_counts_down() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "d1")
        await send(fleet, "r1", "r2")
        await fleet.client.has_tokens("r2", 5)
        said = await leaves(fleet, "d1")
        assert said[0] == "draining: 2 left"
        assert said[-1] == "drained"
        await are_answered(fleet, "r1", "r2")


async def test_a_job_that_reaches_a_worker_that_just_began_to_drain_costs_nothing() -> None:
    """The job was under way when the worker was asked to stop: it goes elsewhere."""
    async with small_fleet() as fleet:
        await a_fleet(fleet, "d1", "d2")
        await send(fleet, "warm", tokens=2)
        await are_answered(fleet, "warm", tokens=2)
        for name in ("d1", "d2"):
            # Draining begins here, but its word has not reached the scheduler.
            fleet.lives[name].member.stopping.set()
            await send(fleet, f"r-{name}", tokens=4, forced=Forced(mode=Mode.LOCAL))
            life = fleet.lives.pop(name)
            if name == "d1":
                await are_answered(fleet, f"r-{name}", tokens=4)
            await life.task
        fleet.worker("d3", Role.DECODE, engine=slow_engine())
        await fleet.ready("d3")
        await are_answered(fleet, "r-d2", tokens=4)


async def test_a_worker_that_leaves_still_answers_what_was_sent_before_all_knew() -> None:
    async with small_fleet() as fleet:
        fleet.worker("d1", Role.DECODE)
        await fleet.ready()
        answers: list[JobAnswer] = []

        async def knock() -> None:
            while True:
                number = len(answers)
                job = GenerateJob(generation=a_generation(f"late{number}"))
                subject = subjects.job(fleet.incarnation("d1"))
                answers.append(await fleet.bus.request(subject, job, JobAnswer, timeout_s=60))
                await asyncio.sleep(0.02)

        life = fleet.lives["d1"]
        life.member.stopping.set()
        async with asyncio.timeout(60):
            while life.member.vitals.readiness.detail != "drained":
                await asyncio.sleep(0.005)
        knocking = asyncio.create_task(knock())
        await asyncio.sleep(0.15)
        knocking.cancel()
        await asyncio.wait([knocking])
        assert len(answers) >= 3
        assert {type(answer) for answer in answers} == {JobRefused}
        reasons = {answer.reason for answer in answers if isinstance(answer, JobRefused)}
        assert reasons == {RefusalReason.DRAINING}


@pytest.mark.parametrize("victim", ["d1", "p1"])
async def test_what_a_drain_has_no_time_for_is_handed_back(victim: str) -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=slow_engine(0.8), drain_s=0.2)
        fleet.worker("d1", Role.DECODE, engine=slow_engine(0.02), drain_s=0.2)
        await fleet.ready()
        await send(fleet, "r1", tokens=60)
        await (fleet.client.has_tokens("r1", 3) if victim == "d1" else fleet.until_reserved("d1"))
        fleet.worker("p2", Role.PREFILL, engine=slow_engine())
        fleet.worker("d2", Role.DECODE, engine=slow_engine())
        await fleet.ready("p2", "d2")
        began_s = now_s()
        await leaves(fleet, victim)
        end = await fleet.client.ended("r1")
        assert now_s() - began_s < 4.0, "nobody waited for a deadline"
        assert (end.reason, end.attempt) == (EndReason.LENGTH, 2)
        assert fleet.client.delivered["r1"] == toy_answer(PROMPT, 60)
        assert (await fleet.closed("r1")).lost_attempts == 0
        assert (await told(fleet, victim)).left == 1
        await fleet.settled()


async def test_a_lone_scheduler_finishes_what_is_live() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "d1")
        await send(fleet, "r1")
        await fleet.client.has_tokens("r1", 5)
        said = await leaves(fleet, "s1")
        assert said[0] == "draining: 1 left"
        assert said[-1] == "drained"
        await are_answered(fleet, "r1")
        assert (await told(fleet, "s1")).left == 0


async def test_a_scheduler_with_a_replica_hands_over_and_leaves_at_once() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "d1")
        await send(fleet, "r1", tokens=400)
        await fleet.client.has_tokens("r1", 5)
        fleet.scheduler("s2")
        await fleet.ready("s2")
        await asyncio.sleep(0.3)
        began_s = now_s()
        await leaves(fleet, "s1")
        assert now_s() - began_s < 1.0
        await are_answered(fleet, "r1", tokens=400)
        assert (await fleet.closed("r1")).owner == fleet.incarnation("s2")
        assert fleet.client.views["r1"].attempt == 1


async def test_a_scheduler_drains_no_longer_than_it_may() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "d1")
        fleet.scheduler("s2", drain_s=0.3)
        await fleet.ready("s2")
        await leaves(fleet, "s1")
        await send(fleet, "r1", tokens=400)
        await fleet.client.has_tokens("r1", 5)
        await leaves(fleet, "s2")
        assert (await told(fleet, "s2")).left == 1
        fleet.scheduler("s3")
        await are_answered(fleet, "r1", tokens=400)

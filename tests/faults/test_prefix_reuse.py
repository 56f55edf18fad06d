"""Prefix reuse across the fleet: who has cached a prompt gets its kind, and tells so."""

import asyncio
from itertools import count

import pytest

from diptych_contracts.fleet import Role
from diptych_contracts.journal import End, EndReason, Report
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.sampling import Stopping
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

pytestmark = pytest.mark.virtual_time
PROMPT = tuple(range(1, 201))
HEARD_S = 0.15
"""Blocks are announced every 20 ms."""


def caching(step_s: float = 0.0) -> ToyStepEngine:
    return ToyStepEngine(prefix_sequences=4, step_s=step_s)


async def ask(
    fleet: SmallFleet, name: str, prompt: tuple[int, ...] = PROMPT, **more: object
) -> End:
    await fleet.client.send(
        a_request(name, prompt_ids=prompt, stopping=Stopping(max_tokens=8), **more)
    )
    end = await fleet.client.ended(name)
    assert end.reason is EndReason.LENGTH
    assert fleet.client.delivered[name] == toy_answer(prompt, 8)
    return end


async def a_fleet(fleet: SmallFleet, *prefills: str, step_s: float = 0.0) -> None:
    """A scheduler, workers, and proof that the scheduler knows them all."""
    fleet.scheduler()
    for name in prefills:
        fleet.worker(name, Role.PREFILL, engine=caching(step_s))
    fleet.worker("d1", Role.DECODE, engine=caching())
    await fleet.ready()
    known: set[str] = set()
    for number in count():
        prompt = (900, number % 99 + 1)
        end = await ask(fleet, f"known{number}", prompt, forced=Forced(mode=Mode.REMOTE))
        known.add(prefill_of(end))
        if known == set(prefills):
            return


def report(end: End) -> Report:
    assert end.report is not None
    return end.report


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_repeated_prompt_comes_from_the_cache(mode: Mode) -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "p1")
        cold = await ask(fleet, "cold", forced=Forced(mode=mode))
        warm = await ask(fleet, "warm", forced=Forced(mode=mode))
        theirs = await ask(fleet, "theirs", forced=Forced(mode=mode), tenant="other")
        cached = [report(end).cached_tokens for end in (cold, warm, theirs)]
        assert cached == [0, 192, 0]
        assert report(warm).engine == "sim-1"
        await fleet.settled()


async def test_the_worker_that_has_a_prefix_is_chosen_for_it() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "p1", "p2")
        first = report(await ask(fleet, "first"))
        await asyncio.sleep(HEARD_S)
        for number in range(4):
            again = report(await ask(fleet, f"again{number}"))
            assert (again.prefill_worker, again.cached_tokens) == (first.prefill_worker, 192)


async def test_a_scheduler_that_comes_late_asks_what_is_cached() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "p1", "p2")
        first = report(await ask(fleet, "first"))
        await asyncio.sleep(HEARD_S)
        await fleet.kill("s1")
        fleet.scheduler("s2")
        await fleet.ready("s2")
        await asyncio.sleep(HEARD_S)
        for number in range(4):
            asked = ask(fleet, f"again{number}", forced=Forced(mode=Mode.REMOTE))
            assert report(await asked).prefill_worker == first.prefill_worker


async def test_a_hot_prefix_does_not_overload_one_worker() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet, "p1", "p2", step_s=0.02)
        await ask(fleet, "first")
        await asyncio.sleep(HEARD_S)
        prompts = {f"r{n}": (*PROMPT[:128], *range(n, n + 72)) for n in range(300, 312)}
        ends = await asyncio.gather(*(ask(fleet, n, prompt) for n, prompt in prompts.items()))
        assert {prefill_of(end) for end in ends} == {"p1", "p2"}
        await fleet.settled()


def prefill_of(end: End) -> str:
    """The name the fleet gave the prefill worker."""
    return report(end).prefill_worker.partition("-")[0]

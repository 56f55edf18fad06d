"""Engines that tell several tokens per step: nothing on the way minds, nor does a recovery."""

import pytest

from diptych_contracts.fleet import Role
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Stopping
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

pytestmark = pytest.mark.virtual_time

PROMPT = tuple(range(1, 101))
TOKENS = 200


def drafting() -> ToyStepEngine:
    return ToyStepEngine(step_s=0.004, draft_tokens=4)


async def a_fleet(fleet: SmallFleet) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=drafting())
    for name in ("d1", "d2"):
        fleet.worker(name, Role.DECODE, engine=drafting())
    await fleet.ready()


async def test_several_tokens_per_step_arrive_once_and_in_order() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet)
        stopping = Stopping(max_tokens=TOKENS)
        for name in ("one", "two"):
            await fleet.client.send(a_request(name, prompt_ids=PROMPT, stopping=stopping))
        for name in ("one", "two"):
            end = await fleet.client.ended(name)
            assert end.reason is EndReason.LENGTH, end
            assert fleet.client.delivered[name] == toy_answer(PROMPT, TOKENS)
        assert fleet.client.most_at_once > 1


async def test_a_killed_worker_takes_no_drafted_token_with_it() -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet)
        await fleet.client.send(
            a_request("r", prompt_ids=PROMPT, stopping=Stopping(max_tokens=TOKENS))
        )
        await fleet.client.has_tokens("r", 20)
        busy = next(n for n in ("d1", "d2") if fleet.engines[n].cells_used)
        await fleet.kill(busy)
        end = await fleet.client.ended("r")
        assert end.reason is EndReason.LENGTH, end
        assert fleet.client.delivered["r"] == toy_answer(PROMPT, TOKENS)
        assert (await fleet.closed("r")).lost_attempts == 1

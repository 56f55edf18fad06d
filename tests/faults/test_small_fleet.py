"""The whole request path in one process: memory bus, toy engine, real KV links."""

import pytest

from diptych_contracts.fleet import Role
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Forced, Mode
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import small_fleet
from diptych_testkit.toy_engine import toy_answer


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("prompt_tokens", [1, 63, 64, 65, 300])
async def test_both_modes_give_the_engines_own_answer(mode: Mode, prompt_tokens: int) -> None:
    prompt = tuple(range(1, prompt_tokens + 1))
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL)
        fleet.worker("d1", Role.DECODE)
        await fleet.ready()
        await fleet.send(a_request("r1", prompt_ids=prompt, forced=Forced(mode=mode)))
        end = await fleet.ended("r1")
        assert end.reason is EndReason.LENGTH
        assert fleet.client.delivered["r1"] == toy_answer(prompt, 16)
        assert end.report is not None
        assert end.report.mode == mode

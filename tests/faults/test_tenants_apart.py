"""What one tenant has cached is not seen by another: in no answer, no index, no time.

In virtual time a step takes what it takes, so times are exact: equal, or a leak.
"""

import asyncio
from dataclasses import dataclass

import pytest

from diptych_contracts import subjects
from diptych_contracts.blocks import BlocksQuery, BlocksSnapshot
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.sampling import Stopping
from diptych_policy.prefixes import block_hashes
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine

pytestmark = pytest.mark.virtual_time
PROMPT = tuple(range(1, 514))
"""Eight full blocks and a token."""
STEP_S = 0.05
QUIET_S = 1.0


@dataclass(frozen=True)
class Seen:
    """What a client sees of a request, and what it cost the engines."""

    cached: int
    first_token_s: float
    prefill_tokens: int
    prefill_ms: float
    prefill_wait_ms: float
    kv_ms: float


class Fleet:
    """One prefill and one decode worker whose steps take their time."""

    def __init__(self, fleet: SmallFleet) -> None:
        self.fleet = fleet
        self.engines = {n: ToyStepEngine(prefix_sequences=4, step_s=STEP_S) for n in ("p", "d")}

    async def start(self) -> None:
        self.fleet.scheduler()
        self.fleet.worker("p", Role.PREFILL, engine=self.engines["p"])
        self.fleet.worker("d", Role.DECODE, engine=self.engines["d"])
        await self.fleet.ready()
        await asyncio.sleep(QUIET_S)

    async def ask(self, name: str, tenant: str, mode: Mode, prompt: tuple[int, ...]) -> Seen:
        loop, client = asyncio.get_running_loop(), self.fleet.client
        await asyncio.sleep(QUIET_S - loop.time() % QUIET_S)  # the same place in every rhythm
        before = self._computed()
        request = a_request(
            name,
            prompt_ids=prompt,
            tenant=tenant,
            stopping=Stopping(max_tokens=4),
            forced=Forced(mode=mode),
        )
        began_s = loop.time()
        await client.send(request)
        await client.has_tokens(name, 1)
        first_s = loop.time() - began_s
        report = (await client.ended(name)).report
        assert report is not None
        return Seen(
            cached=report.cached_tokens,
            first_token_s=round(first_s, 6),
            prefill_tokens=self._computed() - before,
            prefill_ms=round(report.prefill_ms, 3),
            prefill_wait_ms=round(report.prefill_wait_ms, 3),
            kv_ms=round(report.transfer_ms, 3),
        )

    def _computed(self) -> int:
        return sum(engine.tokens_computed for engine in self.engines.values())

    async def blocks(self, worker: str) -> set[int]:
        me = self.fleet.incarnation(worker)
        query = BlocksQuery(asker=Incarnation("test"))
        told: BlocksSnapshot = await self.fleet.bus.request(
            subjects.control(me), query, BlocksSnapshot, timeout_s=5
        )
        return set(told.stored)


@pytest.mark.parametrize("mode", list(Mode))
async def test_anothers_cached_prompt_takes_as_long_as_one_nobody_has_sent(mode: Mode) -> None:
    async with small_fleet() as small:
        fleet = Fleet(small)
        await fleet.start()
        cold = await fleet.ask("cold", "a", mode, PROMPT)
        warm = await fleet.ask("warm", "a", mode, PROMPT)
        theirs = await fleet.ask("theirs", "b", mode, PROMPT)
        never = await fleet.ask("never", "b", mode, tuple(reversed(PROMPT)))
        assert theirs == cold == never
        assert theirs.cached == 0
        assert theirs.prefill_tokens > len(PROMPT)
        # The same tenant does see it, in every one of these: so the measure measures.
        assert warm.cached == 512
        assert warm.first_token_s < theirs.first_token_s / 2
        assert warm.prefill_tokens < 10
        await small.settled()


async def test_no_block_has_a_name_in_common_with_anothers() -> None:
    async with small_fleet() as small:
        fleet = Fleet(small)
        await fleet.start()
        worker = "p"
        await fleet.ask("a1", "a", Mode.REMOTE, PROMPT)
        await asyncio.sleep(QUIET_S)
        ours = await fleet.blocks(worker)
        await fleet.ask("b1", "b", Mode.REMOTE, PROMPT)
        await asyncio.sleep(QUIET_S)
        both = await fleet.blocks(worker)
        assert len(ours) == 8
        assert len(both) == 16
        assert ours == set(block_hashes("a", "toy", PROMPT, 64))
        assert both - ours == set(block_hashes("b", "toy", PROMPT, 64))

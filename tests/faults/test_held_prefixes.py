"""Only blocks that the decode worker lacks cross: a conversation's next turn brings what is new.

What it has is kept from the reservation to the import. Should it have to go all the same, nothing
wrong is decoded: the attempt fails, and the next one is sent everything.
"""

import asyncio
from typing import Any

import pytest

from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.fleet import Role
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import Forced, KvPath, Mode, Request
from diptych_contracts.sampling import Stopping
from diptych_engine.prefix_reuse import PrefixReuse
from diptych_engine.step_loop import StepLoop
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

pytestmark = pytest.mark.virtual_time

BLOCK = 64
ANSWER = 16
FIRST = tuple(range(1, 201))
SECOND = (*FIRST, *toy_answer(FIRST, ANSWER), *range(300, 360))
"""The first turn, its answer, and what is said next: 276 tokens, five blocks."""
HELD = (len(FIRST) + ANSWER - 1) // BLOCK
"""Full blocks of the first turn: the last token of its answer has no KV."""
both_links = pytest.mark.parametrize("link", ["shm", "tcp"])


async def a_pair(fleet: SmallFleet, *decodes: str, step_s: float = 0.0, **settings: Any) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(prefix_sequences=4, step_s=step_s))
    settings = {"kv_reuse": True} | settings
    for name in decodes or ("d1",):
        engine = ToyStepEngine(prefix_sequences=4, step_s=step_s)
        fleet.worker(name, Role.DECODE, engine=engine, **settings)
    await fleet.ready()


async def send(fleet: SmallFleet, name: str, prompt: tuple[int, ...], **more: Any) -> Request:
    forced = more.pop("forced", Forced(mode=Mode.REMOTE, link=more.pop("link", None)))
    stopping = Stopping(max_tokens=ANSWER)
    request = a_request(name, prompt_ids=prompt, stopping=stopping, forced=forced, **more)
    await fleet.client.send(request)
    return request


async def answered(fleet: SmallFleet, name: str, prompt: tuple[int, ...]) -> End:
    end = await fleet.client.ended(name)
    assert end.reason is EndReason.LENGTH
    assert fleet.client.delivered[name] == toy_answer(prompt, ANSWER)
    return end


async def ask(fleet: SmallFleet, name: str, prompt: tuple[int, ...], **more: Any) -> End:
    await send(fleet, name, prompt, **more)
    return await answered(fleet, name, prompt)


async def crossed(fleet: SmallFleet, name: str, worker: str = "d1") -> tuple[int, int]:
    """Of the last attempt at a request: blocks that were sent, and those its reader had."""
    ask_it = KvAsk(ended=64, about=name)
    subject = subjects.control(fleet.incarnation(worker))
    told = await fleet.bus.request(subject, ask_it, KvSnapshot, timeout_s=2.0)
    transfers = [t for t in told.transfers if t.transfer_id.startswith(f"{name}.")]
    last = max(transfers, key=lambda transfer: transfer.transfer_id)
    return last.blocks, last.held_blocks


def pins_of(fleet: SmallFleet, worker: str = "d1") -> PrefixReuse:
    """What the engine of a worker keeps."""
    loop = fleet.loops[worker]
    assert isinstance(loop, StepLoop)
    return loop._prefixes


def pinned(fleet: SmallFleet) -> int:
    return len(pins_of(fleet)._cache._pins)


@both_links
async def test_the_second_turn_brings_only_what_is_new(link: str) -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await ask(fleet, "first", FIRST, link=link)
        end = await ask(fleet, "second", SECOND, link=link)
        assert await crossed(fleet, "first") == (4, 0)
        assert await crossed(fleet, "second") == (5 - HELD, HELD)
        assert end.report is not None
        assert end.report.link == link
        assert end.report.cached_tokens == 192  # prefill's own cache, as ever
        await fleet.settled()
        assert pinned(fleet) == 0


async def test_what_ends_at_a_block_s_edge_brings_its_last_block() -> None:
    edge = FIRST[: 3 * BLOCK]
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await ask(fleet, "first", edge)
        await ask(fleet, "again", edge)
        assert await crossed(fleet, "again") == (1, 2)
        await fleet.settled()


async def test_nothing_is_held_for_another_tenant() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await ask(fleet, "first", FIRST)
        await ask(fleet, "theirs", SECOND, tenant="other")
        assert await crossed(fleet, "theirs") == (5, 0)
        await fleet.settled()


async def test_without_the_setting_everything_crosses() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet, kv_reuse=False)
        await ask(fleet, "first", FIRST)
        await ask(fleet, "second", SECOND)
        assert await crossed(fleet, "second") == (5, 0)


async def test_what_parks_is_sent_whole() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet, kv_parking_host_bytes=1 << 20)
        await ask(fleet, "first", FIRST)
        forced = Forced(mode=Mode.REMOTE, path=KvPath.DIS_CPU)
        await ask(fleet, "second", SECOND, forced=forced)
        assert await crossed(fleet, "second") == (5, 0)
        await fleet.settled()


async def until_pinned(fleet: SmallFleet) -> None:
    async with asyncio.timeout(60):
        while not pinned(fleet):
            await asyncio.sleep(0.001)


async def test_a_prefix_that_had_to_go_costs_an_attempt_and_no_answer() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet, step_s=0.05)
        await ask(fleet, "first", FIRST)
        await send(fleet, "second", SECOND)
        await until_pinned(fleet)
        assert pins_of(fleet).forget("default") > 0
        end = await answered(fleet, "second", SECOND)
        assert end.attempt == 2
        assert await crossed(fleet, "second") == (5, 0)
        await fleet.settled()


async def test_a_pinned_prefix_outlives_prompts_that_want_its_room() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(step_s=0.05))
        small = ToyStepEngine(prefix_sequences=4, prefix_tokens=4 * BLOCK)
        fleet.worker("d1", Role.DECODE, engine=small, kv_reuse=True)
        await fleet.ready()
        await ask(fleet, "first", FIRST)
        await send(fleet, "second", SECOND)
        await until_pinned(fleet)
        other = tuple(range(500, 700))
        await ask(fleet, "other", other, forced=Forced(mode=Mode.LOCAL))
        end = await answered(fleet, "second", SECOND)
        assert end.attempt == 1
        assert await crossed(fleet, "second") == (5 - HELD, HELD)
        await fleet.settled()


async def test_a_cancelled_ticket_lets_go() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet, step_s=0.05)
        await ask(fleet, "first", FIRST)
        request = await send(fleet, "second", SECOND)
        await until_pinned(fleet)
        fleet.client.cancel(request)
        end = await fleet.client.ended("second")
        assert end.reason is EndReason.CANCELLED
        await fleet.settled()
        assert pinned(fleet) == 0


async def test_prefill_s_death_lets_go() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet, step_s=0.05)
        await ask(fleet, "first", FIRST)
        await send(fleet, "second", SECOND)
        await until_pinned(fleet)
        await fleet.kill("p1")
        fleet.worker("p2", Role.PREFILL)
        end = await answered(fleet, "second", SECOND)
        assert end.attempt == 2
        await fleet.settled()
        assert pinned(fleet) == 0


async def test_decode_s_death_costs_the_prefix_and_no_token() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet, step_s=0.05)
        await ask(fleet, "first", FIRST)
        await send(fleet, "second", SECOND)
        await until_pinned(fleet)
        await fleet.kill("d1")
        d2 = ToyStepEngine(prefix_sequences=4)
        fleet.worker("d2", Role.DECODE, engine=d2, kv_reuse=True)
        end = await answered(fleet, "second", SECOND)
        assert end.attempt == 2
        assert await crossed(fleet, "second", "d2") == (5, 0)
        await fleet.settled()


async def test_of_two_decode_workers_the_one_that_has_most_is_chosen() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet, "d1", "d2")
        first = await ask(fleet, "first", FIRST)
        assert first.report is not None
        for number in range(4):
            await fleet.settled()
            await asyncio.sleep(0.15)  # virtual: blocks are announced every 20 ms
            end = await ask(fleet, f"again{number}", SECOND)
            assert end.report is not None
            assert end.report.decode_worker == first.report.decode_worker

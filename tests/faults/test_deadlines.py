"""Every deadline ends in a word the client sees; without the bus all but accept and total stand."""

import asyncio
from typing import Any

import pytest

from diptych_bus.port import Delivery
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway
from diptych_contracts.fleet import QueueLoad, Role
from diptych_contracts.jobs import DecodeJob
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Deadlines, PriorityClass, Request
from diptych_contracts.sampling import Stopping
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

pytestmark = pytest.mark.virtual_time

PROMPT = tuple(range(1, 101))


def request(max_tokens: int = 16, **deadlines: float) -> Request:
    return a_request(
        "r1",
        prompt_ids=PROMPT,
        stopping=Stopping(max_tokens=max_tokens),
        deadlines=Deadlines(**deadlines),
    )


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def a_pair(fleet: SmallFleet) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(step_s=0.01))
    fleet.worker("d1", Role.DECODE, engine=ToyStepEngine(step_s=0.01))
    await fleet.ready()


async def away(fleet: SmallFleet, seconds: float) -> None:
    fleet.broker.go_away()
    await asyncio.sleep(seconds)
    fleet.broker.come_back()


@pytest.mark.parametrize("away_s", [0.0, 2.0])
async def test_the_first_token_deadline_stands_still_without_the_bus(away_s: float) -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await fleet.ready()
        began_s = now_s()
        await fleet.client.send(request(first_token_s=1.0))
        await asyncio.sleep(0.2)
        await away(fleet, away_s)
        end = await fleet.client.ended("r1", timeout_s=10)
        took_s = now_s() - began_s
        assert end.reason is EndReason.EXPIRED
        assert end.detail == "no first token within 1 s: no worker serves 'toy' at the moment"
        fresh_s = 0.3  # so long the last own beat speaks for the bus
        assert took_s >= 0.9 + away_s - fresh_s, "the time without the bus did not count"


async def test_the_inter_token_deadline_stands_still_without_the_bus() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await fleet.client.send(request(max_tokens=400, inter_token_s=0.8))
        await fleet.client.has_tokens("r1", 20)
        await away(fleet, 2.0)
        end = await fleet.client.ended("r1", timeout_s=20)
        assert end.reason is EndReason.LENGTH
        assert fleet.client.views["r1"].attempt == 1, "nobody was given up"
        assert fleet.client.delivered["r1"] == toy_answer(PROMPT, 400)


async def test_the_total_deadline_does_not_stand_still() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await fleet.ready()
        await fleet.client.send(request(total_s=1.5))
        await asyncio.sleep(0.2)
        await away(fleet, 2.0)
        end = await fleet.client.ended("r1", timeout_s=1.5)
        assert (end.reason, end.detail) == (EndReason.EXPIRED, "the total deadline passed")


async def test_the_transfer_deadline_of_the_request_counts() -> None:
    """The decode worker does not answer the hand-off: 0.5 s later another attempt begins."""
    async with small_fleet() as fleet:
        await a_pair(fleet)
        send = fleet.lives["p1"].bus.request
        unanswered = 0

        async def request_(subject: str, message: Any, reply: Any, *, timeout_s: float) -> Any:
            nonlocal unanswered
            if isinstance(message, DecodeJob) and message.generation.attempt == 1:
                unanswered += 1
                await asyncio.sleep(0.1)
                raise BusAway("no answer")
            return await send(subject, message, reply, timeout_s=timeout_s)

        fleet.lives["p1"].bus.request = request_  # type: ignore[method-assign]
        began_s = now_s()
        await fleet.client.send(request(transfer_s=0.5))
        end = await fleet.client.ended("r1", timeout_s=10)
        assert (end.reason, end.attempt) == (EndReason.LENGTH, 2)
        assert fleet.client.delivered["r1"] == toy_answer(PROMPT, 16)
        assert 1 < unanswered < 9
        assert now_s() - began_s < 5.0
        await fleet.settled()


async def test_schedulers_say_how_long_each_class_waits_and_how_fast_it_is_served() -> None:
    async with small_fleet() as fleet:
        loads: list[QueueLoad] = []
        await fleet.bus.subscribe(subjects.QUEUES, lambda d: loads.append(_queue(d)))
        fleet.scheduler(max_queued=5)
        fleet.worker("d1", Role.DECODE, engine=ToyStepEngine(max_sequences=1, step_s=0.01))
        await fleet.ready()
        names = [f"r{number}" for number in range(8)]
        for name in names:
            tier = PriorityClass.BATCH if name > "r3" else PriorityClass.INTERACTIVE
            await fleet.client.send(a_request(name, prompt_ids=PROMPT, priority_class=tier))
        for name in names:
            await fleet.client.ended(name)
        assert max(load.queued for load in loads) >= 4
        served = {queue.priority_class: queue for queue in loads[-1].classes}
        waited = [{q.priority_class: q.waiting for q in load.classes} for load in loads]
        assert max(by_class[PriorityClass.BATCH] for by_class in waited) >= 3
        assert max(by_class[PriorityClass.STANDARD] for by_class in waited) == 0
        for priority_class in (PriorityClass.INTERACTIVE, PriorityClass.BATCH):
            assert 0.05 < served[priority_class].gap_s < 2.0, "about 17 steps of 10 ms"


def _queue(delivery: Delivery) -> QueueLoad:
    load: QueueLoad = delivery.decode(QueueLoad)
    return load

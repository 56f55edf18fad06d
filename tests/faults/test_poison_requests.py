"""A request that kills whatever runs it, in a whole fleet of toy engines that is restarted."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from diptych_bus.memory import MemoryBus
from diptych_contracts import subjects
from diptych_contracts.dead import Cause, DeadEntry, DeadRequest
from diptych_contracts.fleet import Role
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import DEAD, EVENTS
from diptych_engine.port import StepInput
from diptych_telemetry import metrics
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import EOS_ID, ToyStepEngine, toy_answer

MAGIC = EOS_ID
"""In no answer: a toy engine never finds it likeliest."""
PROMPT = tuple(range(1, 101))
ROLES = {"p": Role.PREFILL, "d": Role.DECODE}


class Restarting:
    """Workers that die of `MAGIC` in a batch, and come again under the next number."""

    def __init__(self, fleet: SmallFleet, tasks: asyncio.TaskGroup) -> None:
        self._fleet = fleet
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self.deaths: list[str] = []

    def start(self, name: str, life: int = 1) -> str:
        full = f"{name}-{life}"

        def on_step(batch: Sequence[StepInput]) -> None:
            time.sleep(0.002)
            if any(MAGIC in run.token_ids for run in batch):
                bus = self._fleet.lives[full].bus
                self._loop.call_soon_threadsafe(self._die, name, life)
                while not bus.closed.done():  # nothing it says from now on arrives
                    time.sleep(0.002)

        self._fleet.worker(full, ROLES[name[0]], engine=ToyStepEngine(on_step=on_step))
        return full

    def _die(self, name: str, life: int) -> None:
        if f"{name}-{life}" in self._fleet.lives:
            self.deaths.append(f"{name}-{life}")
            self._tasks.create_task(self._again(name, life))

    async def _again(self, name: str, life: int) -> None:
        await self._fleet.kill(f"{name}-{life}")
        await asyncio.sleep(0.2)
        self.start(name, life + 1)


def counted(cause: Cause) -> float:
    value = metrics.REGISTRY.get_sample_value(
        "diptych_scheduler_dead_requests_total", {"cause": cause}
    )
    return value or 0.0


async def events(bus: MemoryBus, name: str) -> list[dict[str, Any]]:
    import msgspec

    found = bus.all_stored(EVENTS.name, subject=subjects.event(name))
    return [msgspec.msgpack.decode(item.delivery.data) async for item in found]


async def test_a_poisonous_request_ends_and_its_neighbours_do_not_notice() -> None:
    before = counted(Cause.LOST_WORKERS)
    async with small_fleet() as fleet, asyncio.TaskGroup() as tasks:
        workers = Restarting(fleet, tasks)
        fleet.scheduler("s1")
        fleet.scheduler("s2")
        names = [workers.start(name) for name in ("p1", "d1", "d2")]
        await fleet.ready("s1", "s2", *names)
        long = [f"long{number}" for number in range(6)]
        for name in long:
            await fleet.client.send(
                a_request(name, prompt_ids=PROMPT, stopping=Stopping(max_tokens=400))
            )
        await fleet.client.has_tokens(long[-1], 1)
        await fleet.client.send(a_request("poison", prompt_ids=(*PROMPT, MAGIC)))
        short = 0
        while "poison" not in fleet.client.ends:
            short += 1
            await fleet.client.send(a_request(f"short{short}", prompt_ids=PROMPT))
            await asyncio.sleep(0.3)
        end = fleet.client.ends["poison"]
        assert (end.reason, end.cause) == (EndReason.FAILED, Cause.LOST_WORKERS)
        lost = len(workers.deaths)
        assert lost in (5, 6), "a newcomer of the other scheduler may once have been beside it"
        assert end.detail.startswith(f"{lost} attempts were lost, the last one: ")
        served = [n for n in range(1, short + 1) if f"short{n}" in fleet.client.ends]
        assert served, "the others are served meanwhile"
        for name in long:
            assert (await fleet.client.ended(name)).reason is EndReason.LENGTH
            assert fleet.client.delivered[name] == toy_answer(PROMPT, 400)
        for number in range(1, short + 1):
            assert (await fleet.client.ended(f"short{number}")).reason is EndReason.LENGTH
            assert fleet.client.delivered[f"short{number}"] == toy_answer(PROMPT, 16)
        await fleet.closed("poison")
        await is_buried_once(fleet, lost)
        assert counted(Cause.LOST_WORKERS) == before + 1
        await fleet.settled()


async def is_buried_once(fleet: SmallFleet, lost: int) -> None:
    found = fleet.bus.all_stored(DEAD.name, subject=subjects.DEADS)
    (dead,) = [item.delivery.decode(DeadEntry) async for item in found]
    assert isinstance(dead, DeadRequest)
    assert dead.request is not None
    assert dead.request.prompt_ids == (*PROMPT, MAGIC)
    assert (dead.lost_attempts, dead.tokens) == (lost, 0)
    assert [s.lost for s in dead.setbacks] == [True] * lost
    assert not any(s.apart for s in dead.setbacks[:3])
    assert [s.apart for s in dead.setbacks[-2:]] == [True, True]
    (died,) = await events(fleet.bus, "request_died")
    assert died["request_id"] == "poison"
    assert len(died["workers"]) == lost

"""A whole Diptych in one process, but for the gateway: memory bus, toy engine, real KV links."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random, getrandbits
from typing import Any

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.port import Delivery
from diptych_chassis.member import Member
from diptych_contracts import subjects
from diptych_contracts.fleet import Beat, Role, WorkerLoad
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_engine.port import StepEngine
from diptych_engine.step_loop import StepLoop
from diptych_power.sim import SimulatedDevice
from diptych_scheduler import app as scheduler
from diptych_scheduler.settings import SchedulerSettings
from diptych_testkit.builders import GATEWAY, MODEL
from diptych_testkit.bus_client import BusClient
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_worker.assembling import run_worker
from diptych_worker.settings import WorkerSettings

_BEAT_S = 0.1


class NoStops:
    """Finds no stop string."""

    stopped = False

    def push(self, token_ids: Any) -> str:
        """Nothing is ever held back."""
        return ""


@dataclass(slots=True)
class Life:
    """One member that runs."""

    member: Member
    bus: MemoryBus
    task: asyncio.Task[None]
    beating: bool = True
    known: bool = False
    """It has beaten as ready: the schedulers count on it."""


class SmallFleet:
    """Start members, send requests, end lives."""

    def __init__(self, broker: MemoryBroker, tasks: asyncio.TaskGroup) -> None:
        self.broker = broker
        self.bus = broker.connect("test")
        self.client = BusClient(self.bus, GATEWAY)
        self.lives: dict[str, Life] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self._load_news = asyncio.Event()
        self._life = f"{getrandbits(32):08x}"
        self._tasks = tasks

    def _member(self, service: str, name: str) -> Member:
        bus = self.broker.connect(name)
        return Member(
            service=service, incarnation=self.incarnation(name), bus=bus, rng=Random(name)
        )

    def incarnation(self, name: str) -> Incarnation:
        """A member's full id: its shared memory must not meet that of another test's."""
        return Incarnation(f"{name}-{self._life}")

    def scheduler(self, name: str = "s1", **settings: Any) -> None:
        """Start a scheduler."""
        member = self._member("scheduler", name)
        chosen = SchedulerSettings(tick_s=0.02, **settings)
        self._start(name, member, scheduler.serve(member, chosen))

    def worker(
        self, name: str, role: Role, *, engine: StepEngine | None = None, **settings: Any
    ) -> None:
        """Start a worker on a toy engine."""
        member = self._member(f"{role}-worker", name)
        loop = StepLoop(engine or ToyStepEngine(), lambda _stopping: NoStops())
        chosen = WorkerSettings(**({"transfer_slots": 64} | settings))
        serving = run_worker(
            member,
            chosen,
            role,
            card=tiny_card(model=MODEL),
            engine=loop,
            device=SimulatedDevice(),
        )
        self._start(name, member, serving)

    def _start(self, name: str, member: Member, serving: Any) -> None:
        task = self._tasks.create_task(serving, name=name)
        assert isinstance(member.bus, MemoryBus)
        life = self.lives[name] = Life(member, member.bus, task)
        self._tasks.create_task(self._beat(life))

    async def _beat(self, life: Life) -> None:
        count = 0
        while not life.task.done():
            count += 1
            if life.beating:
                member = life.member
                member.vitals.beat_sent(count, member.now_s())
                beat = Beat(
                    member=member.incarnation,
                    service=member.service,
                    count=count,
                    ready=member.vitals.readiness.ready,
                )
                await life.bus.publish(subjects.beat(member.incarnation), beat)
                life.known = beat.ready
            await asyncio.sleep(_BEAT_S)

    async def ready(self, *names: str, timeout_s: float = 10.0) -> None:
        """Wait until the named members (all, if none) serve, and the schedulers know it."""
        waiting = set(names or self.lives)
        async with asyncio.timeout(timeout_s):
            while waiting:
                await asyncio.sleep(0.01)
                waiting = {n for n in waiting if not self.lives[n].known}

    async def until_reserved(self, worker: str, timeout_s: float = 10.0) -> None:
        """Wait until `worker` has given a ticket."""
        await self.until_load(
            lambda: self.loads[worker].transfer_slots_used > 0, timeout_s=timeout_s
        )

    async def settled(self, timeout_s: float = 10.0) -> None:
        """Wait until no worker holds a sequence, a KV cell or a transfer slot."""
        await self.until_load(
            lambda: all(_holds_nothing(self.loads[w]) for w in self.loads if w in self.lives),
            timeout_s=timeout_s,
        )

    async def until_load(self, holds: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
        """Wait for fresh telemetry of every worker until `holds()`."""
        self.loads.clear()
        workers = {n for n, life in self.lives.items() if life.member.service.endswith("worker")}
        async with asyncio.timeout(timeout_s):
            while not (workers <= self.loads.keys() and holds()):
                self._load_news.clear()
                await self._load_news.wait()

    def _hear_load(self, delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        self.loads[load.worker.removesuffix(f"-{self._life}")] = load
        self._load_news.set()

    async def closed(self, request_id: str, timeout_s: float = 10.0) -> RequestRecord:
        """The record of a request, once it is closed."""
        records = self.bus.bucket(REQUEST_RECORDS, RequestRecord)
        async with asyncio.timeout(timeout_s):
            while True:
                kept = await records.get(request_id)
                if kept is not None and kept.value.state is RecordState.CLOSED:
                    return kept.value
                await asyncio.sleep(0.02)

    async def kill(self, name: str) -> None:
        """End a member's life without a word: nothing it says after this arrives."""
        life = self.lives.pop(name)
        life.beating = False
        await life.bus.kill()
        life.task.cancel()
        await asyncio.wait([life.task])

    async def stop(self) -> None:
        """Ask everybody to stop, and wait."""
        for life in self.lives.values():
            life.member.stopping.set()
        await asyncio.gather(*(life.task for life in self.lives.values()))


@asynccontextmanager
async def small_fleet(broker: MemoryBroker | None = None) -> AsyncIterator[SmallFleet]:
    """A fleet without members; everything still running at the end is stopped."""
    async with asyncio.TaskGroup() as tasks:
        fleet = SmallFleet(broker or MemoryBroker(), tasks)
        await fleet.client.start()
        await fleet.bus.subscribe(subjects.LOADS, fleet._hear_load)
        try:
            yield fleet
        finally:
            await fleet.stop()
            await fleet.client.close()


def _holds_nothing(load: WorkerLoad) -> bool:
    held = (load.running, load.waiting, load.kv_tokens_used, load.transfer_slots_used)
    return held == (0, 0, 0, 0)

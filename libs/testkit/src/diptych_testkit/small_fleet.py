"""A whole Diptych in one process, but for the gateway: memory bus, toy engine, real KV links."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.port import JournalItem
from diptych_chassis.member import Member
from diptych_contracts import subjects
from diptych_contracts.fleet import Beat, Role
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End
from diptych_contracts.requests import Request, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_engine.port import StepEngine
from diptych_engine.step_loop import StepLoop
from diptych_policy.journal import RequestView, parts
from diptych_power.sim import SimulatedDevice
from diptych_scheduler import app as scheduler
from diptych_scheduler.settings import SchedulerSettings
from diptych_testkit.builders import GATEWAY, MODEL
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


@dataclass(slots=True)
class Client:
    """Follows one gateway's journal, as a gateway does."""

    views: dict[RequestId, RequestView] = field(default_factory=dict)
    delivered: dict[RequestId, list[int]] = field(default_factory=dict)
    ends: dict[RequestId, End] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, item: JournalItem) -> None:
        """One journal entry."""
        for part in parts(item.entry):
            view = self.views.get(part.request_id)
            if view is None:
                continue
            change = view.apply(part)
            self.delivered[part.request_id] += change.new_ids
            if change.end is not None:
                assert part.request_id not in self.ends, "a request ended twice"
                self.ends[part.request_id] = change.end
        self.news.set()


class SmallFleet:
    """Start members, send requests, end lives."""

    def __init__(self, broker: MemoryBroker, tasks: asyncio.TaskGroup) -> None:
        self.broker = broker
        self.bus = broker.connect("test")
        self.client = Client()
        self.lives: dict[str, Life] = {}
        self._tasks = tasks
        self._rng = Random(0)
        self._sent = 0

    def _member(self, service: str, name: str) -> Member:
        bus = self.broker.connect(name)
        return Member(service=service, incarnation=Incarnation(name), bus=bus, rng=Random(name))

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
        chosen = WorkerSettings(transfer_slots=64, **settings)
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
                beat = Beat(member=member.incarnation, service=member.service, count=count)
                await life.bus.publish(subjects.beat(member.incarnation), beat)
            await asyncio.sleep(_BEAT_S)

    async def ready(self, *names: str, timeout_s: float = 10.0) -> None:
        """Wait until the named members (all, if none) serve."""
        waiting = set(names or self.lives)
        async with asyncio.timeout(timeout_s):
            while waiting:
                await asyncio.sleep(0.01)
                waiting = {n for n in waiting if not self.lives[n].member.vitals.readiness.ready}

    async def send(self, request: Request) -> None:
        """Store a request, as a gateway does."""
        request = msgspec.structs.replace(request, created_unix_ms=time.time_ns() // 1_000_000)
        self.client.views[request.request_id] = RequestView(request.request_id)
        self.client.delivered[request.request_id] = []
        subject = subjects.request(request.priority_class, request.model)
        await self.bus.store(subject, request, msg_id=request.request_id, timeout_s=1.0)

    async def ended(self, request_id: str, timeout_s: float = 20.0) -> End:
        """Wait for the end of a request."""
        key = RequestId(request_id)
        await self.until(lambda: key in self.client.ends, timeout_s=timeout_s)
        return self.client.ends[key]

    async def until(self, holds: Any, timeout_s: float = 20.0) -> None:
        """Wait for journal news until `holds()`."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                self.client.news.clear()
                await self.client.news.wait()

    async def record(self, request_id: str) -> RequestRecord | None:
        """The record of a request."""
        kept = await self.bus.bucket(REQUEST_RECORDS, RequestRecord).get(request_id)
        return kept.value if kept else None

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
        following = await fleet.bus.follow(GATEWAY, fleet.client.hear)
        beating = tasks.create_task(_beat_as_gateway(fleet.bus))
        try:
            yield fleet
        finally:
            await fleet.stop()
            beating.cancel()
            await following.close()


async def _beat_as_gateway(bus: MemoryBus) -> None:
    while True:
        beat = Beat(member=GATEWAY, service="gateway", count=0, ready=True)
        await bus.publish(subjects.beat(GATEWAY), beat)
        await asyncio.sleep(_BEAT_S)

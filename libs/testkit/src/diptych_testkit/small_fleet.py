"""A whole Diptych in one process, but for the gateway: memory bus, toy engine, KV links.

In virtual time (on a `virtual_time.VirtualLoop`) nothing waits: the loop steps the engines, and KV
links are `virtual_links`. In real time engines and links have their threads, as in a worker.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import cache, partial
from random import Random, getrandbits
from typing import Any

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.port import Delivery
from diptych_chassis.member import Member
from diptych_chassis.vitals import Vitals
from diptych_contracts import subjects
from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import EngineGone
from diptych_contracts.fleet import Beat, Role, WorkerLoad
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_engine.matching import Grammars
from diptych_engine.port import Engine, StepEngine
from diptych_engine.request_loop import RequestLoop
from diptych_engine.request_watch import WatchTimes
from diptych_engine.step_loop import StepLoop
from diptych_kvtiers.port import Tier
from diptych_policy.fleet import Fleet
from diptych_policy.limits import Limits
from diptych_power.sim import SimulatedDevice
from diptych_scheduler import app as scheduler
from diptych_scheduler.settings import SchedulerSettings
from diptych_testkit.builders import GATEWAY, MODEL
from diptych_testkit.bus_client import BusClient
from diptych_testkit.checked_ledger import CheckedLedger
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_testkit.toy_request_engine import ToyRequestEngine
from diptych_testkit.virtual_engine import VirtualEngine
from diptych_testkit.virtual_links import Network
from diptych_testkit.virtual_request_loop import VirtualRequestLoop
from diptych_testkit.virtual_time import LIFE, virtual_loop
from diptych_text.codec import TextCodec
from diptych_worker.assembling import run_worker
from diptych_worker.device import Equipment
from diptych_worker.settings import WorkerSettings

_BEAT_S = 0.1
_SOON = WatchTimes(health_s=0.05, answer_s=5.0, stats_s=0.05)
_EPOCH_MS = 1_700_000_000_000


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
    context: Context
    task: asyncio.Task[None]
    beating: bool = True
    known: bool = False
    """It has beaten as ready: the schedulers count on it."""


class SmallFleet:
    """Start members, send requests, end lives."""

    def __init__(self, broker: MemoryBroker, tasks: asyncio.TaskGroup) -> None:
        self.broker = broker
        self.bus = broker.connect("test")
        self.client = BusClient(self.bus, GATEWAY, unix_ms=self.unix_ms)
        self.lives: dict[str, Life] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self.engines: dict[str, StepEngine | ToyRequestEngine] = {}
        self.loops: dict[str, Engine] = {}
        self.ledgers: dict[str, CheckedLedger] = {}
        self.transfer_slots: dict[str, int] = {}
        self.crashes: list[BaseException] = []
        """Bugs that ended members; that of an engine in real time ends the test's process."""
        self.skew_ms: dict[str, int] = {}
        """How far members' wall clocks are ahead."""
        self._load_news = asyncio.Event()
        self._loop = virtual_loop()
        self.network = Network() if self._loop is not None else None
        """The KV links, in virtual time."""
        self._life = "v" if self._loop is not None else f"{getrandbits(32):08x}"
        self._tasks = tasks

    def unix_ms(self, name: str = "") -> int:
        """Wall time, as a member's clock has it."""
        if self._loop is None:
            return time.time_ns() // 1_000_000 + self.skew_ms.get(name, 0)
        return _EPOCH_MS + round(self._loop.time() * 1000) + self.skew_ms.get(name, 0)

    def _member(self, service: str, name: str) -> tuple[Member, Context]:
        """A member, and the context in which all its code runs."""
        context = copy_context()
        context.run(LIFE.set, name)
        clock = asyncio.get_running_loop().time
        member = Member(
            service=service,
            incarnation=self.incarnation(name),
            bus=context.run(self.broker.connect, name),
            rng=Random(name),
            clock=clock,
            wall_ns=lambda: self.unix_ms(name) * 1_000_000,
            secret_bytes=Random(f"secret of {name}").randbytes,
            vitals=Vitals(clock()),
        )
        return member, context

    def incarnation(self, name: str) -> Incarnation:
        """A member's full id: its shared memory must not meet that of another test's."""
        return Incarnation(f"{name}-{self._life}")

    def name_of(self, member: Incarnation) -> str:
        """The short name of a member."""
        return member.removesuffix(f"-{self._life}")

    def scheduler(self, name: str = "s1", **settings: Any) -> None:
        """Start a scheduler."""
        member, context = self._member("scheduler", name)
        chosen = SchedulerSettings(**({"tick_s": 0.02} | settings))

        def make_ledger(me: Incarnation, fleet: Fleet, limits: Limits) -> CheckedLedger:
            return self.ledgers.setdefault(name, CheckedLedger(me, fleet, limits))

        serving = scheduler.serve(member, chosen, make_ledger=make_ledger)
        self._start(name, member, serving, context=context)

    def worker(
        self,
        name: str,
        role: Role,
        *,
        engine: StepEngine | ToyRequestEngine | None = None,
        card: ModelCard | None = None,
        ended: list[BaseException] | None = None,
        tiers: tuple[Tier, ...] = (),
        **settings: Any,
    ) -> None:
        """Start a worker on a toy engine.

        A worker that ends because its engine was gone puts that into `ended`; `tiers` are KV tiers
        beside those of the settings.
        """
        member, context = self._member(f"{role}-worker", name)
        self.engines[name] = steps = engine or ToyStepEngine()
        chosen = WorkerSettings(**({"transfer_slots": 64} | settings))
        self.transfer_slots[name] = chosen.transfer_slots
        self.loops[name] = engine_loop = self._engine(name, steps)
        equipment = Equipment(engine_loop, SimulatedDevice(), self.network, tiers)
        serving = run_worker(member, chosen, role, card=card or _card(), on=equipment)
        if ended is not None:
            serving = _noting(serving, ended)
        self._start(name, member, serving, context=context)

    def join(
        self, service: str, name: str, serve: Callable[[Member], Coroutine[Any, Any, None]]
    ) -> Life:
        """Start any other member."""
        member, context = self._member(service, name)
        self._start(name, member, context.run(serve, member), context=context)
        return self.lives[name]

    def _engine(self, name: str, steps: StepEngine | ToyRequestEngine) -> Engine:
        if isinstance(steps, ToyRequestEngine):
            if self._loop is not None:
                crashed = partial(self._crashed, name)
                return VirtualRequestLoop(steps, _no_stops, on_crash=crashed, times=_SOON)
            loop = RequestLoop(steps, _no_stops, times=_SOON)
            loop.open()
            return loop
        if self._loop is None:
            return StepLoop(steps, _no_stops, grammars=_grammars(steps))
        assert isinstance(steps, ToyStepEngine)
        crashed = partial(self._crashed, name)
        return VirtualEngine(steps, _no_stops, on_crash=crashed, grammars=_grammars(steps))

    def _start(self, name: str, member: Member, serving: Any, *, context: Context) -> None:
        task = self._tasks.create_task(serving, name=name, context=context)
        assert isinstance(member.bus, MemoryBus)
        life = self.lives[name] = Life(member, member.bus, context, task)
        member.bus.closed.add_done_callback(partial(self._bus_closed, name))
        self._tasks.create_task(self._beat(life), context=context)

    def _bus_closed(self, name: str, closed: asyncio.Future[Exception | None]) -> None:
        """A handler's bug ends a process."""
        error = None if closed.cancelled() else closed.result()
        if error is not None:
            self._crashed(name, error)

    def _crashed(self, name: str, error: BaseException) -> None:
        self.crashes.append(error)
        if name in self.lives:
            self._tasks.create_task(self.kill(name))

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

    async def ready(self, *names: str, timeout_s: float = 60.0) -> None:
        """Wait until the named members (all, if none) serve, and the schedulers know it."""
        waiting = set(names or self.lives)
        async with asyncio.timeout(timeout_s):
            while waiting:
                await asyncio.sleep(0.01)
                waiting = {n for n in waiting if not self.lives[n].known}

    async def until_reserved(self, worker: str, timeout_s: float = 60.0) -> None:
        """Wait until `worker` has given a ticket."""
        await self.until_load(
            lambda: self.loads[worker].transfer_slots_used > 0, timeout_s=timeout_s
        )

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Wait until no worker holds a sequence, a KV cell or a transfer slot."""
        await self.until_load(
            lambda: all(_holds_nothing(self.loads[w]) for w in self.loads if w in self.lives),
            timeout_s=timeout_s,
        )

    async def until_load(self, holds: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Wait for fresh telemetry of every worker until `holds()`."""
        self.loads.clear()
        workers = {n for n, life in self.lives.items() if life.member.service.endswith("worker")}
        async with asyncio.timeout(timeout_s):
            while not (workers <= self.loads.keys() and holds()):
                self._load_news.clear()
                await self._load_news.wait()

    def _hear_load(self, delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        self.loads[self.name_of(load.worker)] = load
        self._load_news.set()

    async def closed(self, request_id: str, timeout_s: float = 60.0) -> RequestRecord:
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
        if self._loop is not None:
            await self._loop.end(name, first=life.bus.kill())
        else:
            await life.bus.kill()
        life.task.cancel()
        await asyncio.wait([life.task])

    def freeze(self, name: str) -> None:
        """Stop a member as SIGSTOP does; only in virtual time."""
        assert self._loop is not None
        self._loop.hold(name)

    def thaw(self, name: str) -> None:
        """Let a frozen member go on, as SIGCONT does."""
        assert self._loop is not None
        self._loop.let_go(name)

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


@cache
def _card() -> ModelCard:
    return tiny_card(model=MODEL)


async def _noting(serving: Coroutine[Any, Any, None], ended: list[BaseException]) -> None:
    try:
        await serving
    except* EngineGone as errors:
        ended += errors.exceptions


def _no_stops(_stopping: Stopping) -> NoStops:
    return NoStops()


def _holds_nothing(load: WorkerLoad) -> bool:
    held = (load.running, load.waiting, load.kv_tokens_used, load.transfer_slots_used)
    return held == (0, 0, 0, 0)


def _grammars(steps: StepEngine) -> Grammars | None:
    """For an engine that says what the small fleet's card can spell."""
    card, spec = _card(), steps.spec
    if spec.vocab_size != card.vocab_size:
        return None
    return Grammars(TextCodec.from_card(card), spec.eos_ids)

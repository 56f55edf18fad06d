"""What a worker says of itself: how full it is, what it draws, whether it is ready."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from diptych_bus.port import Delivery
from diptych_chassis.member import Member
from diptych_chassis.orders import obeying
from diptych_contracts import subjects
from diptych_contracts.errors import EngineGone
from diptych_contracts.fleet import WorkerLoad
from diptych_contracts.power import PowerSetPoint
from diptych_engine.port import Engine
from diptych_policy.exhaustion import Exhaustion
from diptych_policy.job_admission import JobAdmission
from diptych_telemetry import logger
from diptych_worker.device import Device
from diptych_worker.embedding import EmbedDesk
from diptych_worker.metering import WorkerMetrics
from diptych_worker.orphaned import Orphans
from diptych_worker.taking_over import TakeOver

log = logger("worker")


class Reports:
    """One worker's telemetry, and its device's set-points.

    Args:
        member: Whose readiness it judges.
        engine, admission, take_over: What can be full.
        device: What draws power.
        metrics: Kept up to date too.
        waits: Whether jobs may wait here for the engine.
        embedding: What else does.
        orphans: Hand-offs that nobody took.
        moving: What hand-offs from here move at, in bytes per second; 0: not known.
    """

    def __init__(  # noqa: PLR0913 - what a worker is made of
        self,
        member: Member,
        engine: Engine,
        *,
        admission: JobAdmission,
        take_over: TakeOver,
        device: Device,
        metrics: WorkerMetrics,
        waits: bool,
        embedding: EmbedDesk,
        orphans: Orphans,
        moving: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._member = member
        self._engine = engine
        self._admission = admission
        self._take_over = take_over
        self._device = device
        self._metrics = metrics
        self._waits = waits
        self._embedding = embedding
        self._orphans = orphans
        self._moving = moving
        self._returned = asyncio.Event()
        self._exhaustion = Exhaustion()
        self._power = obeying(member, subjects.power(member.incarnation), PowerSetPoint)

    async def send(self) -> None:
        """Judge, measure, and tell everybody."""
        self._judge_engine()
        self._judge_room()
        report = self._load()
        told = self._engine.load()
        pinned = max(self._orphans.pinned, told.pinned_orphans)
        self._metrics.orphans(self._orphans.total, pinned=pinned, recomputed=told.recomputed)
        self._metrics.load(report)
        self._metrics.transfer_slots(
            total=self._take_over.slots_total, quarantined=self._take_over.slots_quarantined
        )
        await self._member.bus.publish(subjects.load(self._member.incarnation), report)

    async def end_once_back(self) -> NoReturn:
        """Wait until the engine was gone and answers again, and end this life.

        It may be another one by now (its version, say), and what it is was asked at the start.

        Raises:
            EngineGone: always.
        """
        await self._returned.wait()
        raise EngineGone(f"{self._engine.spec.engine} is back: {self._admission.out_of_order}")

    def set_power(self, delivery: Delivery) -> None:
        """A set-point came: it counts if whoever governs has signed it."""
        set_point: PowerSetPoint | None = self._power.heard(delivery.data)
        if set_point is not None:
            self._device.apply(set_point, self._member.now_s())

    def _load(self) -> WorkerLoad:
        load = self._engine.load()
        reading = self._device.read(self._member.now_s())
        return WorkerLoad(
            worker=self._member.incarnation,
            draining=self._admission.draining or bool(self._admission.out_of_order),
            running=load.running,
            waiting=len(self._admission) - load.running,
            waiting_tokens=load.waiting_tokens,
            kv_tokens_used=max(load.kv_tokens_used, self._admission.promised_tokens),
            embedding_tokens=self._embedding.waiting_tokens,
            transfer_slots_used=self._take_over.slots_used,
            parked=self._admission.parked,
            parking=self._take_over.parking.rooms,
            seat_gap_s=round(self._take_over.parking.seat_gap_s, 4),
            kv_bytes_per_s=round(self._moving()),
            power_w=reading.power_w,
            cap_w=reading.cap_w,
            energy_j=reading.energy_j,
            energy_source=self._device.energy_source,
        )

    def _judge_engine(self) -> None:
        """Take nothing while the engine is gone: what it held is lost, and told so already."""
        gone, before = self._engine.gone, self._admission.out_of_order
        if gone is None and before:
            self._returned.set()
        self._metrics.engine_gone(gone=gone is not None)
        if gone is None or before:
            return
        self._admission.out_of_order = f"the engine is gone: {gone}"
        log.error("engine_gone", engine=self._engine.spec.engine, error=gone)
        self._member.ready(False, self._admission.out_of_order)

    def _judge_room(self) -> None:
        """Not ready while nothing has fitted in for a while; a person should look why."""
        if self._admission.draining or self._admission.out_of_order:
            return
        smallest = self._engine.spec.layout.block_tokens
        obstacle = self._take_over.obstacle
        if not obstacle and not self._take_over.parking.has_room:
            obstacle = self._admission.obstacle(smallest, may_wait=self._waits)
        reason = self._exhaustion.reason(obstacle, now_s=self._member.now_s())
        self._member.ready(not reason, reason)

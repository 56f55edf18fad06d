"""The shell: telemetry in, set-points out."""

import asyncio
import contextlib

from diptych_bus.port import Delivery, Gone, Kept
from diptych_chassis.draining import Drain
from diptych_chassis.orders import orders_of
from diptych_chassis.running import Member
from diptych_contracts import subjects
from diptych_contracts.errors import Transient
from diptych_contracts.fleet import WorkerLoad, WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_contracts.power import PowerSetPoint
from diptych_contracts.streams import WORKERS
from diptych_policy.orders import MAX_VALID_MS
from diptych_policy.power import (
    LoadSeen,
    PowerEvent,
    PowerGovernor,
    SetCap,
    Ticked,
    WorkerLost,
    WorkerSeen,
)
from diptych_power_governor.leading import Leadership
from diptych_power_governor.settings import GovernorSettings
from diptych_telemetry import logger, metrics

log = logger("power-governor")


class GovernorService:
    """One governor; it acts while it leads, and watches otherwise, ready to take over."""

    def __init__(
        self,
        member: Member,
        governor: PowerGovernor,
        leadership: Leadership,
        settings: GovernorSettings,
    ) -> None:
        self._member = member
        self._bus = member.bus
        self._governor = governor
        self._leadership = leadership
        self._settings = settings
        self._loads: dict[Incarnation, WorkerLoad] = {}
        """The newest report of each worker since the last turn."""
        self._changes: dict[str, PowerEvent] = {}
        """The newest change of each registration since the last turn."""
        self._caps_w: dict[Incarnation, float] = {}
        self._orders = orders_of(member)
        self._sequence = 0
        self._led = False

    async def run(self) -> None:
        """Govern until told to stop. Devices keep their caps until their leases end."""
        loads = await self._bus.subscribe(subjects.LOADS, self._on_load)
        workers = await self._bus.bucket(WORKERS, WorkerRegistration).watch(self._on_worker)
        try:
            self._member.ready(True)
            while not self._member.stopping.is_set():
                await self.turn()
                await self._pause()
        finally:
            drain = Drain(self._member, self._settings.drain_s)
            await loads.close()
            await workers.close()
            with contextlib.suppress(Transient):  # Then the key's TTL frees it.
                await self._leadership.let_go()
        await drain.done()

    async def turn(self) -> None:
        """Take in what has arrived; act on it if this governor leads."""
        for event in self._arrived():
            self._governor.handle(event, now_s=self._member.now_s())
        if not await self._leads():
            return
        effects = self._governor.handle(Ticked(), now_s=self._member.now_s())
        for effect in effects:
            await self._send(effect)

    def _on_load(self, delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        self._loads[load.worker] = load

    def _on_worker(self, change: Kept[WorkerRegistration] | Gone) -> None:
        if isinstance(change, Gone):
            self._changes[change.key] = WorkerLost(Incarnation(change.key))
            return
        registration = change.value
        self._changes[change.key] = WorkerSeen(
            registration.worker,
            registration.role,
            cap_min_w=registration.cap_min_w,
            cap_default_w=registration.cap_default_w,
        )

    def _arrived(self) -> list[PowerEvent]:
        events = [*self._changes.values(), *(LoadSeen(load) for load in self._loads.values())]
        self._changes.clear()
        self._loads.clear()
        return events

    async def _leads(self) -> bool:
        leads = await self._leadership.hold()
        if leads != self._led:
            log.info("leadership_taken" if leads else "leadership_lost")
            self._led = leads
        return leads

    async def _send(self, effect: SetCap) -> None:
        self._sequence += 1
        set_point = PowerSetPoint(
            governor=self._member.incarnation,
            worker=effect.worker,
            sequence=self._sequence,
            cap_w=effect.cap_w,
            lease_ms=round(self._settings.lease_s * 1000),
        )
        subject = subjects.power(effect.worker)
        order = self._orders.signed(
            subject,
            set_point,
            epoch=self._leadership.epoch,
            valid_ms=min(set_point.lease_ms, MAX_VALID_MS),
        )
        await self._bus.publish(subject, order)
        metrics.power().set_points.inc()
        if self._caps_w.get(effect.worker) != effect.cap_w:
            self._caps_w[effect.worker] = effect.cap_w
            log.info("cap_changed", worker_id=effect.worker, cap_w=effect.cap_w)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.tick_s):
                await self._member.stopping.wait()

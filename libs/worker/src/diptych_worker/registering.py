"""Telling the others what this worker offers, and how it is."""

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec

from diptych_bus.port import Bus, Delivery
from diptych_contracts import subjects
from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import Incompatible, Transient
from diptych_contracts.fleet import Beat, ParkingRoom, WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_contracts.streams import MODELS, WORKER_TTL_S, WORKERS
from diptych_contracts.wire import encode

LISTEN_S = 0.5
"""Long enough to hear every live member: beats come every 0.1 s."""


@dataclass(slots=True)
class Register:
    """One worker's entry in bucket `workers`, and its model's card in the object store."""

    bus: Bus
    registration: WorkerRegistration
    card: ModelCard

    def parks(self, rooms: tuple[ParkingRoom, ...]) -> None:
        """Offer `rooms` for KV to wait in."""
        self.registration = msgspec.structs.replace(self.registration, parking=rooms)

    async def enter(self) -> None:
        """Publish card and registration.

        Raises:
            Incompatible: a live worker serves another model under this name.
        """
        await self._check_name()
        await self.bus.put_object(MODELS, subjects.escape(self.card.model), encode(self.card))
        await self.refresh()

    async def refresh(self) -> None:
        """Renew the registration; to be called well within its 30 s."""
        workers = self.bus.bucket(WORKERS, WorkerRegistration)
        await workers.put(self.registration.worker, self.registration, ttl_s=WORKER_TTL_S)

    async def leave(self) -> None:
        """Take the registration back; with the bus away it expires by itself."""
        with contextlib.suppress(Transient):
            await self.bus.bucket(WORKERS, WorkerRegistration).delete(self.registration.worker)

    async def _check_name(self) -> None:
        mine = self.registration
        others = [
            other
            for other in await self._registered()
            if other.model == mine.model and other.fingerprint.base != mine.fingerprint.base
        ]
        if not others:
            return
        alive = await self._heard()
        for other in others:
            if other.worker in alive:
                raise Incompatible(
                    f"model {mine.model!r} is served by {other.worker} with base "
                    f"{other.fingerprint.base}; this worker has base {mine.fingerprint.base}: "
                    "use the same weights, or another model name"
                )

    async def _registered(self) -> list[WorkerRegistration]:
        found = await self.bus.bucket(WORKERS, WorkerRegistration).values()
        return [kept.value for kept in found]

    async def _heard(self) -> set[Incarnation]:
        heard: set[Incarnation] = set()

        def note(delivery: Delivery) -> None:
            heard.add(delivery.decode(Beat).member)

        beats = await self.bus.subscribe(subjects.BEATS, note)
        await asyncio.sleep(LISTEN_S)
        await beats.close()
        return heard

"""Requests on their way from the stream into the ledger."""

import asyncio
from typing import Protocol

from diptych_bus.port import Bus, Pulled
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway, Permanent
from diptych_contracts.events import DeadLetter
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import Request
from diptych_contracts.streams import SCHEDULERS
from diptych_policy.lifecycle import Event, RequestArrived
from diptych_scheduler.performing import Performer
from diptych_telemetry import logger

log = logger("scheduler")

_WAITING = 64
"""More than a pull ever asks for; a full queue leaves messages to redelivery."""


class Teller(Protocol):
    """What the intake needs of the scheduler."""

    def tell(self, event: Event) -> None:
        """Give an event to the ledger."""
        ...

    async def follow(self, gateway: Incarnation) -> None:
        """Read a gateway's journal."""
        ...


class Intake:
    """Acknowledges a request once its record exists (this scheduler's or another's)."""

    def __init__(self, scheduler: Teller, bus: Bus, performer: Performer) -> None:
        self._scheduler = scheduler
        self._bus = bus
        self._performer = performer
        self._waiting: asyncio.Queue[Pulled] = asyncio.Queue(_WAITING)

    def take(self, pulled: Pulled) -> None:
        """A message was pulled."""
        try:
            self._waiting.put_nowait(pulled)
        except asyncio.QueueFull:
            log.warning("intake_full", seq=pulled.seq)

    async def run(self) -> None:
        """Handle messages, in order, until cancelled."""
        while True:
            pulled = await self._waiting.get()
            try:
                await self._handle(pulled)
            except BusAway as err:
                log.warning("intake_delayed", seq=pulled.seq, error=str(err))

    async def _handle(self, pulled: Pulled) -> None:
        try:
            request: Request = pulled.delivery.decode(Request)
        except Permanent as err:
            await self._bury(pulled, str(err))
            await pulled.ack()
            return
        if pulled.num_delivered >= SCHEDULERS.max_deliver:
            await self._bury(pulled, f"delivered {pulled.num_delivered} times")
        await self._scheduler.follow(request.gateway)
        journal_seq = await self._bus.last_seq(request.gateway)
        self._performer.expect(request.request_id, pulled)
        self._scheduler.tell(RequestArrived(request, pulled.seq, journal_seq))

    async def _bury(self, pulled: Pulled, reason: str) -> None:
        delivery = pulled.delivery
        log.error("dead_letter", subject=delivery.subject, seq=pulled.seq, reason=reason)
        letter = DeadLetter(subject=delivery.subject, reason=reason, payload=delivery.data)
        msg_id = f"{SCHEDULERS.stream}.{pulled.seq}"
        await self._bus.store(subjects.dead("requests"), letter, msg_id=msg_id, timeout_s=1.0)

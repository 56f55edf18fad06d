"""Requests on their way from the stream into the ledger."""

import asyncio
from collections.abc import Callable

from diptych_bus.port import Bus, Pulled
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway, Permanent
from diptych_contracts.events import DeadLetter
from diptych_contracts.requests import Request
from diptych_contracts.streams import SCHEDULERS
from diptych_policy.lifecycle import Event, RequestArrived
from diptych_scheduler.journals import Journals
from diptych_scheduler.performing import Performer
from diptych_telemetry import logger

log = logger("scheduler")

_WAITING = 64
"""More than a pull ever asks for; a full queue leaves messages to redelivery."""


class Intake:
    """Acknowledges a request once its record exists (this scheduler's or another's)."""

    def __init__(
        self, bus: Bus, journals: Journals, performer: Performer, tell: Callable[[Event], None]
    ) -> None:
        self._bus = bus
        self._journals = journals
        self._performer = performer
        self._tell = tell
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
        await self._journals.follow(request.gateway)
        journal_seq = (await self._bus.span()).last_seq
        self._performer.expect(request.request_id, pulled)
        self._tell(RequestArrived(request, pulled.seq, journal_seq))

    async def _bury(self, pulled: Pulled, reason: str) -> None:
        delivery = pulled.delivery
        log.error("dead_letter", subject=delivery.subject, seq=pulled.seq, reason=reason)
        letter = DeadLetter(subject=delivery.subject, reason=reason, payload=delivery.data)
        msg_id = f"{SCHEDULERS.stream}.{pulled.seq}"
        await self._bus.store(subjects.dead("requests"), letter, msg_id=msg_id, timeout_s=1.0)

"""Requests on their way from the stream into the ledger."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from diptych_bus.advisories import undelivered
from diptych_bus.port import Bus, Delivery, Pulled
from diptych_bus.verdict import Verdict, verdict
from diptych_contracts.errors import DiptychError, Permanent
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import Request
from diptych_contracts.streams import (
    GATEWAY_HEADER,
    REQUESTS,
    SCHEDULERS,
    SECRET_HEADER,
    UNDELIVERED,
    UNDELIVERED_SCHEDULERS,
    ConsumerSpec,
)
from diptych_policy.lifecycle import Event, RequestArrived, RequestUnreadable
from diptych_scheduler.burying import bury_letter
from diptych_scheduler.journals import Journals
from diptych_telemetry import logger

log = logger("scheduler")

_WAITING = 64
"""More than two pulls ever ask for; a full queue leaves messages to redelivery."""
_REMEMBERED = 1024
"""As many as the consumer lets be under way; 4,096 took 1 MB."""
_AGAIN_S = 0.5
"""After which a message that could not be handled comes again."""


class Recording(Protocol):
    """What the intake needs of whoever writes records."""

    def expect(self, request_id: RequestId, pulled: Pulled) -> None:
        """`pulled` is acknowledged once the request's record exists."""
        ...

    def expected(self) -> Iterable[Pulled]:
        """Those whose record does not exist yet."""
        ...


class Intake:
    """Acknowledges a request once its record exists (this scheduler's or another's).

    Args:
        bus: Where requests are pulled from.
        journals: Of their gateways, to be followed before anything is sent.
        records: Acknowledges.
        tell: The ledger's ear.
        recorded: Whether this scheduler's own record of a request stands.
        seq_of: Where a request that is live here stands in the stream; 0: it is not live.
    """

    def __init__(
        self,
        bus: Bus,
        journals: Journals,
        *,
        records: Recording,
        tell: Callable[[Event], None],
        recorded: Callable[[RequestId], bool],
        seq_of: Callable[[RequestId], int],
    ) -> None:
        self._bus = bus
        self._journals = journals
        self._records = records
        self._tell = tell
        self._recorded = recorded
        self._seq_of = seq_of
        self._waiting: asyncio.Queue[tuple[ConsumerSpec, Pulled]] = asyncio.Queue(_WAITING)
        self._held: dict[tuple[str, int], Pulled] = {}
        """What waits here or is being handled, in order."""
        self._mine: OrderedDict[int, int] = OrderedDict()
        """How often each request came *here*."""

    def take(self, pulled: Pulled) -> None:
        """A request was pulled."""
        self._take(SCHEDULERS, pulled)

    def take_undelivered(self, pulled: Pulled) -> None:
        """The server's word that it gives a request up was pulled."""
        self._take(UNDELIVERED_SCHEDULERS, pulled)

    def _take(self, source: ConsumerSpec, pulled: Pulled) -> None:
        key = (source.stream, pulled.seq)
        if source is SCHEDULERS:
            self._mine[pulled.seq] = self._mine.get(pulled.seq, 0) + 1
            while len(self._mine) > _REMEMBERED:
                self._mine.popitem(last=False)
        if key in self._held:
            return  # it came again before its turn: once is enough
        try:
            self._waiting.put_nowait((source, pulled))
        except asyncio.QueueFull:
            log.warning("intake_full", stream=source.stream, seq=pulled.seq)
        else:
            self._held[key] = pulled

    async def run(self) -> None:
        """Handle messages, in order, until cancelled."""
        while True:
            source, pulled = await self._waiting.get()
            try:
                await self._settle(source, pulled)
            finally:
                del self._held[source.stream, pulled.seq]

    async def hold(self) -> None:
        """Say that everything taken here is in work; to be called well within the ack wait.

        A scheduler without CPU is slow, not dead: its requests must not be handed out again and
        again until the last delivery ends them. One that is frozen or dead says nothing.
        """
        for pulled in [*self._held.values(), *self._records.expected()]:
            await pulled.hold()

    async def _settle(self, source: ConsumerSpec, pulled: Pulled) -> None:
        """Handle a message, and do with it what `bus.verdict` says of how that ended."""
        error: DiptychError | None = None
        try:
            if source is SCHEDULERS:
                elsewhere = self._elsewhere(pulled.seq, pulled.num_delivered)
                await self._take_on(pulled, pulled.seq, pulled.delivery, elsewhere + 1)
            else:
                await self._give_up(pulled)
        except DiptychError as err:
            error = err
            log.warning("intake_delayed", stream=source.stream, seq=pulled.seq, error=str(err))
        deliveries, limit = pulled.num_delivered, source.max_deliver
        match verdict(error, num_delivered=deliveries, max_deliver=limit):
            case Verdict.ACK:
                pass  # once its record stands
            case Verdict.NAK:
                await pulled.nak(_AGAIN_S)
            case Verdict.DROP | Verdict.FAIL:
                await pulled.ack()
            case Verdict.DEAD:
                log.warning("last_delivery", seq=pulled.seq)  # comes back through `UNDELIVERED`

    def _elsewhere(self, seq: int, deliveries: int) -> int:
        """Deliveries to others: those that came here stopped nobody, since this scheduler lives."""
        return deliveries - self._mine.get(seq, 0)

    async def _take_on(self, pulled: Pulled, seq: int, delivery: Delivery, deliveries: int) -> None:
        """Give the ledger the request in `delivery`, which stands at `seq`.

        Raises:
            Transient: the bus is away.
            Permanent: nobody can be told of it.
        """
        try:
            request: Request = delivery.decode(Request)
        except Permanent as err:
            await self._refuse(pulled, seq, delivery, str(err))
            return
        if self._seq_of(request.request_id) not in (0, seq):
            await self._bus.erase(REQUESTS.name, seq)  # it was stored twice
            await pulled.ack()
            return
        if self._recorded(request.request_id):
            await pulled.ack()  # the server forgot the first one
            return
        journal_seq = (await self._bus.span()).last_seq
        # Last, so that the ledger knows of the request before anybody looks which journals idle.
        await self._journals.follow(request.gateway)
        self._records.expect(request.request_id, pulled)
        self._tell(RequestArrived(request, seq, journal_seq, deliveries, pulled.stored_unix_ms))

    async def _refuse(self, pulled: Pulled, seq: int, delivery: Delivery, reason: str) -> None:
        """What is no request is buried; whoever sent it is told, if its headers say who."""
        await bury_letter(self._bus, REQUESTS.name, seq, delivery, reason)
        request_id = delivery.headers.get("Nats-Msg-Id")
        gateway = delivery.headers.get(GATEWAY_HEADER)
        if not request_id or not gateway:
            await self._bus.erase(REQUESTS.name, seq)
            raise Permanent(reason)
        self._records.expect(RequestId(request_id), pulled)
        detail = f"this scheduler cannot read the stored request: {reason}"
        secret = _secret_in(delivery)
        self._tell(
            RequestUnreadable(RequestId(request_id), Incarnation(gateway), seq, detail, secret)
        )

    async def _give_up(self, pulled: Pulled) -> None:
        """A request that nobody took on in time: it gets its record and its end now.

        Raises:
            Permanent: the message is not what stream `UNDELIVERED` holds.
        """
        said = undelivered(pulled.delivery)
        stored = await self._bus.stored(said.stream, said.stream_seq)
        if stored is None:
            await pulled.ack()  # it was taken on after all, and has ended
            return
        log.warning(UNDELIVERED.name.lower(), seq=said.stream_seq, deliveries=said.deliveries)
        elsewhere = self._elsewhere(said.stream_seq, said.deliveries)
        await self._take_on(pulled, said.stream_seq, stored, elsewhere)


def _secret_in(delivery: Delivery) -> bytes:
    """The secret of a request that cannot be read; empty if its headers say none."""
    try:
        return bytes.fromhex(delivery.headers.get(SECRET_HEADER, ""))
    except ValueError:
        return b""

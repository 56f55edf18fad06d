"""Stream `TOKENS` in memory, and what every part of a memory bus shares."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from uuid import uuid4

from diptych_bus.journal_items import journal_item
from diptych_bus.lifetime import Lifetime
from diptych_bus.memory.broker import MemoryBroker
from diptych_bus.memory.following import Following
from diptych_bus.memory.stopping import Owned, Stopping
from diptych_bus.memory.stream import MemoryStream, StoredMessage
from diptych_bus.port import JournalItem, Span, Stored, Subscription, always
from diptych_bus.ring import Ring, Unacked
from diptych_bus.sizes import check_size
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway, Transient
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import JournalEntry
from diptych_contracts.streams import TOKENS
from diptych_contracts.wire import encode

CALL_S = 5.0
CHECK_S = 0.1


class MemoryJournal:
    """See `port.Journal`. The ring is the one the JetStream adapter uses."""

    def __init__(self, broker: MemoryBroker, lifetime: Lifetime) -> None:
        self.lifetime = lifetime
        self.line = broker.line()
        self._broker = broker
        self._owned: list[Owned] = []
        self._ring = Ring()
        self._acked = asyncio.Event()
        self._stopped = False
        self._checking = False
        self._sending = False
        self._unlink = self.line.watch(self._resend)

    @property
    def ring_full(self) -> bool:
        """Whether the ring has reached its limit."""
        return self._ring.full

    def append(self, gateway: Incarnation, entry: JournalEntry) -> None:
        """Add `entry` to the ring; see the port."""
        subject, data = subjects.token(gateway), encode(entry)
        check_size(subject, data)
        self._ring.add(subject, data)
        self._send_soon()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended so far is acknowledged."""
        end = self._ring.end
        try:
            async with asyncio.timeout(timeout_s):
                while self._ring.oldest < end:
                    self._acked.clear()
                    await self._acked.wait()
        except TimeoutError:
            return False
        return True

    async def record(self, gateway: Incarnation, entry: JournalEntry, *, timeout_s: float) -> int:
        """Store one entry and give its sequence."""
        headers = {"Nats-Msg-Id": uuid4().hex}
        subject = subjects.token(gateway)
        return (await self._store(subject, encode(entry), headers, timeout_s)).seq

    async def last_seq(self, gateway: Incarnation) -> int:
        """Sequence of the newest entry of this gateway's journal; 0 if there is none."""
        await self.round_trip()
        return self._tokens.last_on(subjects.token(gateway))

    async def span(self) -> Span:
        """What is left of all gateways' journals."""
        await self.round_trip()
        return Span(self._tokens.first_seq, self._tokens.last_seq)

    async def read(
        self, gateway: Incarnation, *, after_seq: int, until_seq: int | None = None
    ) -> AsyncIterator[JournalItem]:
        """The entries with `after_seq` < sequence ≤ `until_seq` (or up to now), in order."""
        await self.round_trip()
        messages = tuple(self._tokens.on(subjects.token(gateway), after_seq=after_seq))
        for message in messages:
            if until_seq is not None and message.seq > until_seq:
                return
            if (item := journal_item(message.subject, message.seq, message.data)) is not None:
                yield item

    async def follow(
        self,
        gateway: Incarnation,
        handler: Callable[[JournalItem], None],
        *,
        after_seq: int | None = None,
        active: Callable[[], bool] = always,
    ) -> Subscription:
        """Call `handler` for each entry after `after_seq`, once, in order."""
        await self.round_trip()
        subject = subjects.token(gateway)
        if after_seq is None:
            after_seq = self._tokens.last_on(subject)
        following = Following(
            self._tokens, subject, after_seq, show=lambda found: self._show(found, handler)
        )
        stops = [
            self._broker.listen(subject, partial(self._take, following), self.line),
            self.line.watch(following.catch_up),
        ]
        self.line.soon(following.catch_up)
        subscription = Stopping(partial(_stop, following, stops))
        self.own(subscription)
        return subscription

    def _take(self, following: Following, message: StoredMessage) -> None:
        if self.line.up:
            following.take(message)

    async def round_trip(self) -> None:
        """Let others run; raise `BusAway` if the server stays away."""
        await self.line.reachable(CALL_S)

    def own(self, subscription: Owned) -> None:
        """End `subscription` with the bus."""
        self._owned = [owned for owned in self._owned if owned.open]
        self._owned.append(subscription)

    @property
    def _tokens(self) -> MemoryStream:
        return self._broker.streams[TOKENS.name]

    def _show(self, message: StoredMessage, handler: Callable[[JournalItem], None]) -> None:
        if (item := journal_item(message.subject, message.seq, message.data)) is not None:
            self.lifetime.call(handler, item, message.subject)

    async def _store(
        self, subject: str, data: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> Stored:
        check_size(subject, data, headers)
        await self.line.reachable(timeout_s)
        done, ack_lost = self._broker.store(subject, data, headers)
        if ack_lost:
            raise BusAway(f"no answer on {subject} within {timeout_s:g} s")
        return done

    def _send_soon(self) -> None:
        if not self._sending:
            self._sending = True
            self.line.soon(self._send)

    def _send(self) -> None:
        self._sending = False
        if self._stopped or not self.line.up:
            return
        while entry := self._ring.take(self._broker.timers.now_s()):
            self._send_one(entry)

    def _send_one(self, entry: Unacked) -> None:
        now_s = self._broker.timers.now_s()
        try:
            _, ack_lost = self._broker.store(entry.subject, entry.data, {})
        except Transient:
            self._ring.refused(now_s)
            ack_lost = True
        if ack_lost:
            self._check_later()
        else:
            self.line.soon(self._ack, entry.number)

    def _ack(self, number: int) -> None:
        if not self.line.up:
            return
        self._ring.ack(number, self._broker.timers.now_s())
        self._acked.set()
        self._send_soon()

    def _check_later(self) -> None:
        if not self._checking:
            self._checking = True
            self._broker.timers.after(CHECK_S, partial(self.line.soon, self._check))

    def _check(self) -> None:
        self._checking = False
        if self._stopped or not len(self._ring):
            return
        if self._ring.due(self._broker.timers.now_s()):
            self._ring.resend()
            self._send_soon()
        else:
            self._check_later()

    def _resend(self) -> None:
        self._ring.rewind()
        self._send_soon()

    def _stop_sending(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._unlink()


def _stop(following: Following, stops: list[Callable[[], None]]) -> None:
    following.close()
    for stop in stops:
        stop()

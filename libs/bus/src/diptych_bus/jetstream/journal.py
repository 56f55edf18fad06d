"""Stream `TOKENS`: append, record, read, follow."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from uuid import uuid4

from diptych_bus.jetstream import direct
from diptych_bus.jetstream.answers import ApiError, api, stored
from diptych_bus.jetstream.appending import Appender
from diptych_bus.jetstream.connection import Connection
from diptych_bus.jetstream.following import Follower
from diptych_bus.journal_items import journal_item
from diptych_bus.port import JournalItem, Span, always
from diptych_contracts import subjects
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import JournalEntry
from diptych_contracts.streams import TOKENS
from diptych_contracts.wire import encode


class JetStreamJournal:
    """See `port.Journal`."""

    def __init__(self, connection: Connection, appender: Appender) -> None:
        self._connection = connection
        self._appender = appender

    @property
    def ring_full(self) -> bool:
        """Whether the ring has reached its limit."""
        return self._appender.full

    def append(self, gateway: Incarnation, entry: JournalEntry) -> None:
        """Add `entry` to the ring; see the port."""
        self._appender.append(gateway, entry)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended so far is acknowledged."""
        return await self._appender.flush(timeout_s)

    async def record(self, gateway: Incarnation, entry: JournalEntry, *, timeout_s: float) -> int:
        """Store one entry and give its sequence.

        It carries an id, so that sending it again within the deadline stores it once.
        """
        done = await stored(
            self._connection,
            subjects.token(gateway),
            encode(entry),
            headers={"Nats-Msg-Id": uuid4().hex},
            timeout_s=timeout_s,
        )
        return done.seq

    async def last_seq(self, gateway: Incarnation) -> int:
        """Sequence of the newest entry of this gateway's journal; 0 if there is none."""
        last = await direct.last_on(self._connection, TOKENS.name, subjects.token(gateway))
        return direct.seq_of(last) if last else 0

    async def span(self) -> Span:
        """What is left of all gateways' journals."""
        try:
            info = await api(
                self._connection, f"STREAM.INFO.{TOKENS.name}", {}, timeout_s=direct.CALL_S
            )
        except ApiError as err:
            raise err.judged(f"cannot look at {TOKENS.name}") from err
        state = info["state"]
        last_seq = int(state["last_seq"])
        return Span(int(state["first_seq"]) if state["messages"] else last_seq + 1, last_seq)

    async def read(
        self, gateway: Incarnation, *, after_seq: int, until_seq: int | None = None
    ) -> AsyncIterator[JournalItem]:
        """The entries with `after_seq` < sequence ≤ `until_seq` (or up to now), in order."""
        subject = subjects.token(gateway)
        messages = direct.all_on(self._connection, TOKENS.name, subject, after_seq=after_seq)
        async with aclosing(messages):
            async for msg in messages:
                seq = direct.seq_of(msg)
                if until_seq is not None and seq > until_seq:
                    return
                if (item := journal_item(subject, seq, msg.data)) is not None:
                    yield item
                if seq == until_seq:
                    return

    async def follow(
        self,
        gateway: Incarnation,
        handler: Callable[[JournalItem], None],
        *,
        after_seq: int | None = None,
        active: Callable[[], bool] = always,
    ) -> Follower:
        """Call `handler` for each entry after `after_seq`, once, in order."""
        follower = Follower(self._connection, gateway, handler=handler, active=active)
        return await follower.start(after_seq)

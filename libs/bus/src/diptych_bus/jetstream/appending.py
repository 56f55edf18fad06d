"""Sending the ring of un-acknowledged journal entries: one task, one ack inbox.

`append` only puts an entry into the ring and wakes the task, which sends it in the loop's next
round. After a loss of the connection nothing is sent until the reconnect; then everything
un-acknowledged is, oldest first, so new entries never overtake old ones.
"""

import asyncio
import logging

import nats.errors
from nats.aio.msg import Msg

from diptych_bus.jetstream.connection import Connection, Listening
from diptych_bus.lifetime import heeding, stop
from diptych_bus.ring import Ring, Unacked
from diptych_bus.sizes import check_size
from diptych_contracts import subjects
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import JournalEntry
from diptych_contracts.wire import encode

log = logging.getLogger("diptych.bus")

CHECK_S = 0.1
"""How often overdue entries are looked for."""
WARN_EVERY_S = 1.0


class Appender:
    """The ring and the task that empties it; made by `start`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._ring = Ring()
        self._prefix = connection.inbox() + "."
        self._wake = asyncio.Event()
        self._drained: list[tuple[int, asyncio.Future[None]]] = []
        self._paused = False
        self._warn_at_s = 0.0
        self._inbox: Listening | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stop_watching = connection.watch_link(up=self._resume, down=self._pause)

    @classmethod
    async def start(cls, connection: Connection) -> "Appender":
        """Listen for acknowledgements and start sending."""
        self = cls(connection)
        self._inbox = await connection.listen(self._prefix + "*", self._on_ack)
        self._task = connection.lifetime.start(self._send_all(), "journal ring")
        self._check()
        return self

    @property
    def full(self) -> bool:
        """Whether callers should pause."""
        return self._ring.full

    def append(self, gateway: Incarnation, entry: JournalEntry) -> None:
        """See `port.Journal.append`."""
        subject, data = subjects.token(gateway), encode(entry)
        check_size(subject, data)
        self._ring.add(subject, data)
        self._wake.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended so far is acknowledged."""
        if self._ring.oldest >= (end := self._ring.end):
            return True
        drained: asyncio.Future[None] = self._loop.create_future()
        waiter = (end, drained)
        self._drained.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await drained
        except TimeoutError:
            return False
        finally:
            self._drained.remove(waiter)
        return True

    async def close(self) -> None:
        """Stop sending; what is not acknowledged is lost, so `flush` first."""
        self._stop_watching()
        if self._timer is not None:
            self._timer.cancel()
        await stop(self._task)
        if self._inbox is not None:
            await self._inbox.close()

    async def _send_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while not self._paused and (entry := self._ring.take(self._loop.time())):
                await self._send(entry)

    async def _send(self, entry: Unacked) -> None:
        try:
            await heeding(
                self._connection.client.publish(
                    entry.subject, entry.data, reply=f"{self._prefix}{entry.number}"
                )
            )
        except (nats.errors.Error, OSError) as err:
            log.debug("journal_send_failed: %s: %s", entry.subject, err)
            self._ring.refused(self._loop.time())

    def _on_ack(self, msg: Msg) -> None:
        now_s = self._loop.time()
        number = int(msg.subject[len(self._prefix) :])
        if msg.headers or b'"error"' in msg.data:
            self._refused(msg, now_s)
            return
        self._ring.ack(number, now_s)
        self._wake.set()
        if self._drained:
            oldest = self._ring.oldest
            for end, drained in self._drained:
                if oldest >= end and not drained.done():
                    drained.set_result(None)

    def _refused(self, msg: Msg, now_s: float) -> None:
        self._ring.refused(now_s)
        if now_s >= self._warn_at_s:
            self._warn_at_s = now_s + WARN_EVERY_S
            log.warning("journal_entry_refused: %s", msg.data.decode() or msg.headers)

    def _check(self) -> None:
        if not self._paused and self._ring.due(self._loop.time()):
            self._ring.resend()
            self._wake.set()
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def _pause(self) -> None:
        self._paused = True

    def _resume(self) -> None:
        self._paused = False
        self._ring.rewind()
        self._wake.set()

"""Following a gateway's journal: the republished messages, healed from the stream.

States: *live* (messages are delivered as they come, while each names the cursor as its predecessor)
and *repairing* (live messages only say how far the journal reaches; the stream is read from the
cursor until it gets there). A gap, a reconnect, or silence with a newer last entry starts a repair.
"""

import asyncio
import logging
from collections.abc import Callable

from nats.aio.msg import Msg

from diptych_bus.cursor import Cursor, Step
from diptych_bus.jetstream import direct
from diptych_bus.jetstream.connection import Connection, Listening
from diptych_bus.journal_items import journal_item
from diptych_bus.lifetime import stop, woken
from diptych_bus.port import JournalItem
from diptych_contracts import subjects
from diptych_contracts.errors import Transient
from diptych_contracts.ids import Incarnation
from diptych_contracts.streams import TOKENS

log = logging.getLogger("diptych.bus")

SILENCE_S = 0.25
"""Silence after which the stream is asked whether the last entry was missed."""
RETRY_S = 0.1


class Follower:
    """One followed journal; made by `start`."""

    def __init__(
        self,
        connection: Connection,
        gateway: Incarnation,
        *,
        handler: Callable[[JournalItem], None],
        active: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._gateway = gateway
        self._subject = subjects.token(gateway)
        self._handler = handler
        self._active = active
        self._loop = asyncio.get_running_loop()
        self._cursor = Cursor(0)
        self._reach_seq = 0
        """How far the journal is known to reach."""
        self._repairing = True
        self._heard_s = self._loop.time()
        self._wake = asyncio.Event()
        self._listening: Listening | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_watching = connection.watch_link(up=self._repair_soon)

    async def start(self, after_seq: int | None) -> "Follower":
        """Follow from `after_seq`, or from the newest entry."""
        try:
            self._listening = await self._connection.listen_for_others(
                subjects.live(self._gateway), self._on_live
            )
            if after_seq is None:
                last = await direct.last_on(self._connection, TOKENS.name, self._subject)
                after_seq = direct.seq_of(last) if last else 0
        except BaseException:
            await self.close()
            raise
        self._cursor = Cursor(after_seq)
        self._task = self._connection.lifetime.start(self._heal(), f"follow {self._subject}")
        self._wake.set()
        return self

    async def close(self) -> None:
        """No handler is called after this."""
        self._stop_watching()
        if self._listening is not None:
            await self._listening.close()
        await stop(self._task)

    def _on_live(self, msg: Msg) -> None:
        self._heard_s = self._loop.time()
        seq = direct.seq_of(msg)
        self._reach_seq = max(self._reach_seq, seq)
        if self._repairing:
            return
        match self._cursor.offer(seq, direct.last_seq_of(msg)):
            case Step.DELIVER:
                self._deliver(seq, msg.data)
            case Step.GAP:
                self._repair_soon()
            case Step.SKIP:
                pass

    def _deliver(self, seq: int, data: bytes) -> None:
        if (item := journal_item(self._subject, seq, data)) is not None:
            self._connection.lifetime.call(self._handler, item, self._subject)

    def _repair_soon(self) -> None:
        self._repairing = True
        self._wake.set()

    async def _heal(self) -> None:
        while True:
            await woken(self._wake, SILENCE_S)
            try:
                await self._look()
            except Transient as err:
                log.debug("journal_repair_delayed: %s: %s", self._subject, err)
                await asyncio.sleep(RETRY_S)

    async def _look(self) -> None:
        silent = self._loop.time() - self._heard_s >= SILENCE_S
        if not self._repairing and silent and self._active():
            last = await direct.last_on(self._connection, TOKENS.name, self._subject)
            self._repairing = last is not None and direct.seq_of(last) > self._cursor.seq
        if self._repairing:
            await self._repair()

    async def _repair(self) -> None:
        while True:
            reach_seq = self._reach_seq
            messages = direct.all_on(
                self._connection, TOKENS.name, self._subject, after_seq=self._cursor.seq
            )
            async for msg in messages:
                self._cursor.seq = direct.seq_of(msg)
                self._deliver(self._cursor.seq, msg.data)
            if self._reach_seq == reach_seq:
                # What lies between cursor and reach, if anything, has left the stream by age.
                self._cursor.seq = max(self._cursor.seq, reach_seq)
            if self._reach_seq <= self._cursor.seq:
                self._repairing = False
                return

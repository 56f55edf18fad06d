"""Which batches this gateway runs: it takes over what nobody owns, and hands back what it holds."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from diptych_bus.port import Bus
from diptych_contracts.batches import BatchRecord
from diptych_contracts.errors import Transient
from diptych_contracts.ids import Incarnation
from diptych_gateway.batches.owning import Ownership, take_over
from diptych_gateway.batches.running import BatchParts, BatchRun
from diptych_gateway.files.board import Board
from diptych_policy.batches import next_to_run
from diptych_telemetry import logger

LOOK_S = 1.0
"""How often is looked for batches whose owner fell silent."""

log = logger(__name__)


@dataclass(slots=True, kw_only=True)
class BatchRunner:
    """Runs batches until the gateway stops."""

    bus: Bus
    me: Incarnation
    board: Board[BatchRecord]
    parts: BatchParts
    at_once: int
    stopping: asyncio.Event
    ready: Callable[[], bool]
    """Whether requests would be served now."""
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Take over and run until cancelled, or the gateway drains."""
        async with asyncio.TaskGroup() as tasks:
            until = tasks.create_task(self.stopping.wait())
            try:
                while not until.done():
                    await self._take_over(tasks)
                    await self._news(until)
            finally:
                until.cancel()
                for task in self._running.values():
                    task.cancel()

    async def _take_over(self, tasks: asyncio.TaskGroup) -> None:
        with suppress(Transient):
            while self.ready():
                found = next_to_run(
                    self.board,
                    self._running,
                    at_once=self.at_once,
                    now_unix_ms=self.bus.unix_ms(),
                )
                if found is None:
                    return
                own = await take_over(self.bus, self.board, self.me, found.batch_id)
                if own is None:  # the board is a moment late
                    return
                task = tasks.create_task(self._one(own), name=f"batch {found.batch_id}")
                self._running[found.batch_id] = task

    async def _one(self, own: Ownership) -> None:
        batch_id = own.record.batch_id
        try:
            await BatchRun(own, self.parts).run()
        except asyncio.CancelledError:
            await own.leave()
            raise
        finally:
            self._running.pop(batch_id, None)
            self.board.news.set()

    async def _news(self, until: "asyncio.Task[bool]") -> None:
        """Wait until there may be something to do."""
        self.board.news.clear()
        hearing = asyncio.create_task(self.board.news.wait())
        try:
            await asyncio.wait(
                {hearing, until}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            hearing.cancel()

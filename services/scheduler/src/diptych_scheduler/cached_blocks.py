"""What workers have cached: followed as they announce it, asked for where something was missed."""

import asyncio

from diptych_bus.port import Bus, Delivery
from diptych_contracts import subjects
from diptych_contracts.blocks import BlocksChanged, BlocksQuery, BlocksSnapshot
from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import Incarnation
from diptych_policy.prefix_index import PrefixIndex
from diptych_telemetry import logger

log = logger("scheduler")

_ASK_S = 1.0


class CachedBlocks:
    """Feeds the index. A worker that does not answer is asked again when it next announces."""

    def __init__(
        self, bus: Bus, index: PrefixIndex, tasks: asyncio.TaskGroup, me: Incarnation
    ) -> None:
        self._bus = bus
        self._index = index
        self._tasks = tasks
        self._me = me
        self._asked: dict[Incarnation, asyncio.Task[None]] = {}
        self._stopped = False

    async def listen(self) -> None:
        """Hear every worker."""
        await self._bus.subscribe(subjects.BLOCKS, self._on_changed)

    def registered(self, worker: Incarnation) -> None:
        """A worker is there: it may have cached what was announced before this process lived."""
        if worker not in self._index:
            self._ask(worker)

    def stop(self) -> None:
        """Ask nobody any more, whoever is still heard."""
        self._stopped = True
        for task in self._asked.values():
            task.cancel()

    def _on_changed(self, delivery: Delivery) -> None:
        event: BlocksChanged = delivery.decode(BlocksChanged)
        if self._index.changed(event):
            self._ask(event.worker)

    def _ask(self, worker: Incarnation) -> None:
        if worker not in self._asked and not self._stopped:
            self._asked[worker] = self._tasks.create_task(self._query(worker))

    async def _query(self, worker: Incarnation) -> None:
        try:
            while True:
                snapshot: BlocksSnapshot = await self._bus.request(
                    subjects.control(worker),
                    BlocksQuery(asker=self._me),
                    BlocksSnapshot,
                    timeout_s=_ASK_S,
                )
                if not self._index.told(snapshot):
                    return
        except DiptychError as err:
            log.info("cached_blocks_unknown", worker=worker, error=str(err))
        finally:
            del self._asked[worker]

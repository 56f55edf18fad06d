"""What this worker has cached, told to whoever routes."""

from collections.abc import Sequence

from diptych_bus.port import Messaging
from diptych_contracts import subjects
from diptych_contracts.blocks import BlocksChanged, BlocksSnapshot
from diptych_contracts.ids import Incarnation

_BLOCKS_PER_SNAPSHOT = 65_536
"""600 kB; nobody remembers more of one worker."""


class AnnouncedBlocks:
    """The blocks others know of, and what they do not know yet.

    Changes are gathered between two announcements, so a busy engine does not make a message per
    step. Used on the event loop only.
    """

    def __init__(self, bus: Messaging, worker: Incarnation) -> None:
        self._bus = bus
        self._worker = worker
        self._event_id = 0
        self._announced: dict[int, None] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def changed(self, *, stored: tuple[int, ...], removed: tuple[int, ...]) -> None:
        """The engine keeps, and keeps no more."""
        for block in removed:
            _note(block, self._removed, opposite=self._stored)
        for block in stored:
            _note(block, self._stored, opposite=self._removed)

    def leading(self, blocks: Sequence[int]) -> int:
        """How many of the first `blocks` the engine keeps, as far as it has said."""
        for count, block in enumerate(blocks):
            known = block in self._stored or block in self._announced
            if not known or block in self._removed:
                return count
        return len(blocks)

    async def announce(self) -> None:
        """Tell what has changed, if anything has."""
        if not self._stored and not self._removed:
            return
        self._event_id += 1
        stored, removed = tuple(self._stored), tuple(self._removed)
        self._stored, self._removed = {}, {}
        for block in removed:
            self._announced.pop(block, None)
        self._announced.update(dict.fromkeys(stored))
        event = BlocksChanged(
            worker=self._worker, event_id=self._event_id, stored=stored, removed=removed
        )
        await self._bus.publish(subjects.blocks(self._worker), event)

    @property
    def count(self) -> int:
        """How many blocks others know of."""
        return len(self._announced)

    def snapshot(self) -> BlocksSnapshot:
        """All that was announced."""
        return BlocksSnapshot(
            worker=self._worker,
            event_id=self._event_id,
            stored=tuple(self._announced)[:_BLOCKS_PER_SNAPSHOT],
        )


def _note(block: int, happened: dict[int, None], *, opposite: dict[int, None]) -> None:
    if block in opposite:
        del opposite[block]
    else:
        happened[block] = None

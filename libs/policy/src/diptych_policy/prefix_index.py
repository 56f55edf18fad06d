"""Which worker holds which prefix, as far as a scheduler has heard.

Workers number what they announce. A number that does not follow the last one is a gap: the index
then asks for a snapshot, and until that comes goes on with what it has. It is a hint only: a worker
that has evicted a block meanwhile computes it again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diptych_contracts.blocks import BlocksChanged, BlocksSnapshot
from diptych_contracts.ids import Incarnation

BLOCKS_PER_WORKER = 65_536
"""About 6 MB; what a worker has beyond that is not remembered."""


@dataclass(slots=True)
class _Held:
    event_id: int
    """Last event that is part of `blocks`."""
    newest_id: int
    """Newest event heard of."""
    blocks: set[int] = field(default_factory=set)


class PrefixIndex:
    """Cached blocks of all workers, by hash."""

    def __init__(self, blocks_per_worker: int = BLOCKS_PER_WORKER) -> None:
        self._limit = blocks_per_worker
        self._workers: dict[Incarnation, _Held] = {}

    def __contains__(self, worker: Incarnation) -> bool:
        return worker in self._workers

    def changed(self, event: BlocksChanged) -> bool:
        """Blocks came and went; gives whether a snapshot is needed."""
        held = self._workers.setdefault(event.worker, _Held(0, 0))
        held.newest_id = max(held.newest_id, event.event_id)
        if event.event_id == held.event_id + 1:
            held.event_id = event.event_id
            held.blocks.difference_update(event.removed)
            self._add(held, event.stored)
        return held.newest_id > held.event_id

    def told(self, snapshot: BlocksSnapshot) -> bool:
        """All blocks of a worker; gives whether another snapshot is needed."""
        held = self._workers.setdefault(snapshot.worker, _Held(0, 0))
        if snapshot.event_id >= held.event_id:
            held.event_id = snapshot.event_id
            held.blocks = set()
            self._add(held, snapshot.stored)
        held.newest_id = max(held.newest_id, held.event_id)
        return held.newest_id > held.event_id

    def forget(self, worker: Incarnation) -> None:
        """A worker is gone."""
        self._workers.pop(worker, None)

    def overlap_blocks(self, worker: Incarnation, hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt `worker` has."""
        held = self._workers.get(worker)
        if held is None or not held.blocks:
            return 0
        for number, block in enumerate(hashes):
            if block not in held.blocks:
                return number
        return len(hashes)

    def _add(self, held: _Held, blocks: Iterable[int]) -> None:
        for block in blocks:
            if len(held.blocks) >= self._limit:
                return
            held.blocks.add(block)

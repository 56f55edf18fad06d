"""Copies of KV blocks on their way into the tiers.

Blocks become final on the engine's thread, or lie in a link's buffer on the link's: there they are
copied, once, and only those that are wanted. Nobody waits for a tier: what has no room is dropped
and counted.
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence

from diptych_contracts.tiers import TierKey
from diptych_engine.port import BlockSink

ON_THE_WAY_BYTES = 64 * 1024 * 1024
"""Copies that the tiers have not taken yet: 45 blocks of SmolLM2-135M."""

Take = Callable[[TierKey, bytes, int], None]
"""A block, and how many orders to forget tenants there were when its prompt came."""


class TierWriting:
    """Hands copies over to the event loop.

    Args:
        take: Called on the loop, once for each copy.
        most_bytes: Copies that may wait for it.
    """

    def __init__(self, take: Take, *, most_bytes: int = ON_THE_WAY_BYTES) -> None:
        self._take = take
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._n_bytes = 0
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """Blocks that found no room."""
        return self._dropped

    def offer(self, key: TierKey, data: memoryview, orders: int = 0) -> None:
        """Copy a block, if there is room. From any thread; never waits, never raises."""
        n_bytes = data.nbytes
        with self._lock:
            if self._n_bytes + n_bytes > self._most_bytes:
                self._dropped += 1
                return
            self._n_bytes += n_bytes
        try:
            self._loop.call_soon_threadsafe(self._arrived, key, bytes(data), orders)
        except RuntimeError:  # The loop is closed: this worker has ended.
            self._went(n_bytes)

    def _arrived(self, key: TierKey, data: bytes, orders: int) -> None:
        self._went(len(data))
        self._take(key, data, orders)

    def _went(self, n_bytes: int) -> None:
        with self._lock:
            self._n_bytes -= n_bytes


class TierTee:
    """Of one prompt's blocks those that are wanted go into the tiers.

    Called with blocks that are on their way elsewhere, and as the `BlockSink` of work that sends
    its blocks nowhere.

    Args:
        writing: Takes the copies.
        keys: Of the prompt's full blocks.
        wanted: Which of them, by index.
        slot_bytes: Size of a full block.
        orders: As of `Take`.
    """

    def __init__(
        self,
        writing: TierWriting,
        keys: Sequence[TierKey],
        *,
        wanted: Collection[int],
        slot_bytes: int,
        orders: int = 0,
    ) -> None:
        self._writing = writing
        self._keys = keys
        self._wanted = wanted
        self._slot = memoryview(bytearray(0))
        self._slot_bytes = slot_bytes
        self._orders = orders

    def __call__(self, index: int, data: memoryview) -> None:
        """Block `index` is final; `data` may change once this returns."""
        if index in self._wanted:
            self._writing.offer(self._keys[index], data, self._orders)

    def buffer(self, index: int) -> memoryview:
        """Memory for one block, the same each time."""
        if not self._slot:
            self._slot = memoryview(bytearray(self._slot_bytes))
        return self._slot

    def written(self, index: int, n_bytes: int) -> None:
        """Block `index` lies in the buffer."""
        self(index, self._slot[:n_bytes])


class TierFirst:
    """The `BlockSink` of a prompt whose first blocks do not travel: those go into the tiers only.

    Args:
        tee: Takes the first blocks.
        others: Takes those that follow.
        first: The first of these.
    """

    def __init__(self, tee: TierTee, others: BlockSink, first: int) -> None:
        self._tee, self._others, self._first = tee, others, first

    def buffer(self, index: int) -> memoryview:
        """Memory for one block."""
        return self._sink(index).buffer(index)

    def written(self, index: int, n_bytes: int) -> None:
        """Block `index` lies in its buffer."""
        self._sink(index).written(index, n_bytes)

    def _sink(self, index: int) -> BlockSink:
        return self._tee if index < self._first else self._others

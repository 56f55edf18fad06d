"""The memory a reader receives into, behind one gate per slot.

A byte is copied into a slot only under that slot's lock, by a call that does not wait, and only
while the gate is open to that writer, transfer and generation. So once `set` has closed a gate not
a byte of the slot changes any more, and it can be handed out again at once. `set` waits for at most
one copy of what the kernel already holds.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.transfers import SlotRef
from diptych_kvlink.port import CLOSED
from diptych_kvlink.tcp_wire import Stored


class Holder(NamedTuple):
    """Whom a slot was given to, and for what. Compared for every block: a tuple is, in 0.1 us."""

    writer: Incarnation
    transfer_id: TransferId


class SlotGates:
    """Who may write which slot. Safe to use from several threads."""

    def __init__(self, slots: Sequence[memoryview]) -> None:
        self._slots = list(slots)
        self._locks = [threading.Lock() for _ in slots]
        self._open: list[tuple[int, Holder | None]] = [(CLOSED, None)] * len(slots)

    def __len__(self) -> int:
        return len(self._slots)

    def set(self, slot: int, generation: int, holder: Holder | None = None) -> None:
        """Open a slot to `holder` under `generation`, or close it."""
        with self._locks[slot]:
            self._open[slot] = (generation, holder)

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot, read-only."""
        return self._slots[slot][:n_bytes].toreadonly()

    def is_open(self, ref: SlotRef, holder: Holder) -> bool:
        """Whether `holder` may write the slot under this generation."""
        return ref.generation != CLOSED and self._open[ref.slot] == (ref.generation, holder)

    def why_closed(self, ref: SlotRef, holder: Holder) -> Stored:
        """What `holder` is told of a slot that it may not write, or could not a moment ago."""
        generation, current = self._open[ref.slot]
        if ref.generation == CLOSED or ref.generation != generation:
            return Stored.CLOSED
        if current is None or current.writer != holder.writer:
            return Stored.OTHER_WRITER
        return Stored.OTHER_TRANSFER if current != holder else Stored.CLOSED

    def copy(
        self,
        parts: Sequence[tuple[SlotRef, slice]],
        holder: Holder,
        receive: Callable[[Sequence[memoryview]], int],
    ) -> int | None:
        """Let `receive`, which must not wait, fill parts of slots one after another.

        It is offered them as far as `holder` may write them. Gives its bytes; None if `holder` may
        not even write the first.
        """
        locks = [self._locks[slot] for slot in sorted({ref.slot for ref, _ in parts})]
        for lock in locks:  # In one order everywhere, so that nobody waits in a ring.
            lock.acquire()
        try:
            offered = []
            for ref, part in parts:
                if not self.is_open(ref, holder):
                    break
                offered.append(self._slots[ref.slot][part])
            return receive(offered) if offered else None
        finally:
            for lock in locks:
                lock.release()

    def drop(self) -> None:
        """Close every slot and let the memory go."""
        for slot, lock in enumerate(self._locks):
            with lock:
                self._open[slot] = (CLOSED, None)
                self._slots[slot] = memoryview(b"")

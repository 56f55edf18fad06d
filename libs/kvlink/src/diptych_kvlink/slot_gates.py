"""The memory a reader receives into, behind one gate per slot.

A byte is copied into a slot only under that slot's lock, by a call that does not wait, and only
while the gate is open to that writer and generation. So once `set` has closed a gate not a byte of
the slot changes any more, and it can be handed out again at once. `set` waits for at most one copy
of what the kernel already holds.
"""

import threading
from collections.abc import Callable, Sequence

from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import SlotRef
from diptych_kvlink.port import CLOSED


class SlotGates:
    """Who may write which slot. Safe to use from several threads."""

    def __init__(self, slots: Sequence[memoryview]) -> None:
        self._slots = list(slots)
        self._locks = [threading.Lock() for _ in slots]
        self._open: list[tuple[int, Incarnation | None]] = [(CLOSED, None)] * len(slots)

    def __len__(self) -> int:
        return len(self._slots)

    def set(self, slot: int, generation: int, writer: Incarnation | None) -> None:
        """Open a slot to `writer` under `generation`, or close it."""
        with self._locks[slot]:
            self._open[slot] = (generation, writer)

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot, read-only."""
        return self._slots[slot][:n_bytes].toreadonly()

    def is_open(self, ref: SlotRef, writer: Incarnation) -> bool:
        """Whether `writer` may write the slot under this generation."""
        return ref.generation != CLOSED and self._open[ref.slot] == (ref.generation, writer)

    def copy(
        self,
        ref: SlotRef,
        writer: Incarnation,
        part: slice,
        receive_some: Callable[[memoryview], int],
    ) -> int | None:
        """Let `receive_some` fill `part` of a slot; gives its bytes, None if that is forbidden."""
        with self._locks[ref.slot]:
            if not self.is_open(ref, writer):
                return None
            return receive_some(self._slots[ref.slot][part])

    def drop(self) -> None:
        """Close every slot and let the memory go."""
        for slot, lock in enumerate(self._locks):
            with lock:
                self._open[slot] = (CLOSED, None)
                self._slots[slot] = memoryview(b"")

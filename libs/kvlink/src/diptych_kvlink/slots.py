"""Which transfer slots are free, held or in quarantine. Pure bookkeeping.

A slot's generation rises each time it is handed out, so a reference from an earlier use is
recognizably stale. Quarantined slots are out of circulation: somebody may still write into them.
"""

from collections import deque
from collections.abc import Iterable

from diptych_contracts.errors import Refused
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.transfers import SlotRef


class SlotPool:
    """A fixed number of slots. The one that has been free longest is handed out first."""

    def __init__(self, slots: int) -> None:
        if slots < 0:
            raise ValueError(f"a pool has no fewer than 0 slots, got {slots}")
        self._generation = [0] * slots
        self._free = deque(range(slots))
        self._held: dict[int, SlotRef] = {}
        self._quarantined: dict[int, SlotRef] = {}

    @property
    def total(self) -> int:
        """All slots."""
        return len(self._generation)

    @property
    def used(self) -> int:
        """Slots that cannot be handed out, quarantined ones included."""
        return len(self._held) + len(self._quarantined)

    @property
    def quarantined(self) -> int:
        """Slots that somebody who has no right to them may still touch."""
        return len(self._quarantined)

    def take(self, count: int) -> tuple[SlotRef, ...]:
        """Hand out `count` slots under new generations. Raises `Refused` (`no_room`)."""
        if count > len(self._free):
            raise Refused(
                RefusalReason.NO_ROOM,
                f"needs {count} transfer slots, {len(self._free)} of {self.total} are free "
                f"({self.quarantined} in quarantine)",
            )
        return tuple(self._hand_out(self._free.popleft()) for _ in range(count))

    def quarantine(self, refs: Iterable[SlotRef]) -> None:
        """Keep held slots out of circulation until they are freed. Idempotent."""
        for ref in refs:
            if self._quarantined.get(ref.slot) != ref:
                self._drop(self._held, ref)
                self._quarantined[ref.slot] = ref

    def free(self, refs: Iterable[SlotRef]) -> None:
        """Put held or quarantined slots back. Raises `ValueError` for a stale reference."""
        for ref in refs:
            holder = self._quarantined if ref.slot in self._quarantined else self._held
            self._drop(holder, ref)
            self._free.append(ref.slot)

    def check(self) -> None:
        """Raise `AssertionError` unless each slot is in exactly one place."""
        places = sorted([*self._free, *self._held, *self._quarantined])
        assert places == list(range(self.total)), f"slots lost or doubled: {places}"

    def _hand_out(self, slot: int) -> SlotRef:
        self._generation[slot] += 1
        ref = SlotRef(slot=slot, generation=self._generation[slot])
        self._held[slot] = ref
        return ref

    def _drop(self, holder: dict[int, SlotRef], ref: SlotRef) -> None:
        if holder.get(ref.slot) != ref:
            raise ValueError(f"{ref} is not held; the slot has {holder.get(ref.slot)}")
        del holder[ref.slot]

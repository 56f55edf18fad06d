"""Where handed-over KV waits outside the engine: this process's memory, or a file on disk.

A *lot* is a number of slots, each for one block as it came (encoded and sealed as it was). Who is
to park has room reserved from before anything is written (`reserve`), so what was taken can be
kept.
`prepare`, `put`, `take` and `trim` may block: they are called off the event loop, by one thread,
and nothing of their transfer is freed meanwhile. `take` gives what was put, or raises; never other
bytes.

A lot that fails is out of order (`away`) for a while that doubles: it refuses, and is asked again.
So is one that hangs, until it does not.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from diptych_contracts.errors import Refused
from diptych_contracts.fleet import ParkingRoom
from diptych_contracts.ids import TransferId
from diptych_contracts.jobs import RefusalReason

_FIRST_AWAY_S, _LONGEST_AWAY_S = 1.0, 60.0
_NEW = 0.3
"""Share of the newest measurement in a rate."""
_LEAST_BYTES = 64 * 1024
"""Less says nothing of a rate."""


class Store(Protocol):
    """What keeps the bytes of a lot's slots."""

    def allocate(self, slot: int) -> None:
        """Make sure that a block can be kept in `slot`. May block. Raises `OSError`."""
        ...

    def write(self, slot: int, block: memoryview) -> None:
        """Keep a copy of `block`. May block. Raises `OSError`."""
        ...

    def read(self, slot: int) -> memoryview:
        """What was written. May block. Raises `OSError`, or `Unverified` if it is not that."""
        ...

    def is_allocated(self, slot: int) -> bool:
        """Whether `allocate` has nothing to do for `slot`."""
        ...

    def drop(self, slots: Sequence[int], *, last: bool) -> None:
        """Forget what they hold; `last`: no slot holds anything any more."""
        ...

    def trim(self) -> None:
        """Give back the room of slots that hold nothing. May block. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class Lot:
    """Slots for blocks that wait, and who has them. But for `put` and `take` on one thread.

    Args:
        kind: `host` or `disk`.
        total_bytes: Most it holds.
        slot_bytes: The longest block.
        store: Keeps them.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        kind: str,
        store: Store,
        *,
        total_bytes: int,
        slot_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.kind = kind
        self._store = store
        self._slot_bytes = slot_bytes
        self._slots = total_bytes // slot_bytes
        self._fresh = 0
        """Slots from here on were never used: of a large lot a list of them would be larger yet."""
        self._free: deque[int] = deque()
        """Slots that were used and hold nothing now."""
        self._held: dict[TransferId, tuple[int, ...]] = {}
        self._clock = clock
        self._away_s = 0.0
        self._away_until_s = 0.0
        self._rates: dict[str, float] = {}
        self.hangs = False
        """Something that was begun here does not end."""
        self.moved_s = clock()
        """When a block was last moved."""

    @property
    def away(self) -> bool:
        """Whether it is out of order for now."""
        return self.hangs or self._clock() < self._away_until_s

    @property
    def is_empty(self) -> bool:
        """Whether nobody has room here."""
        return not self._held

    @property
    def room(self) -> ParkingRoom:
        """What others may know of it."""
        used = self._slots - self._free_slots
        return ParkingRoom(
            kind=self.kind,
            total_bytes=0 if self.away else self._slots * self._slot_bytes,
            used_bytes=used * self._slot_bytes,
            bytes_per_s=min(self._rates.values(), default=0.0),
        )

    def reserve(self, transfer_id: TransferId, blocks: int) -> None:
        """Keep room for so many. Idempotent. Raises `Refused` (`no_room`)."""
        if transfer_id in self._held:
            return
        if self.away:
            raise Refused(RefusalReason.NO_ROOM, f"parking on {self.kind} is out of order")
        if blocks > self._free_slots:
            raise Refused(
                RefusalReason.NO_ROOM,
                f"parking on {self.kind} needs {blocks} slots, "
                f"{self._free_slots} of {self._slots} are free",
            )
        slots = self._next(blocks)
        for _ in range(min(blocks, len(self._free))):
            self._free.popleft()
        self._fresh = max([self._fresh, *(slot + 1 for slot in slots)])
        self._held[transfer_id] = slots
        try:
            for slot in slots:
                self._store.allocate(slot)
        except OSError as err:
            self.free(transfer_id)
            self.failed()
            raise Refused(
                RefusalReason.NO_ROOM, f"no room to park on {self.kind}: {err.strerror}"
            ) from err

    def lacking(self, blocks: int) -> tuple[int, ...]:
        """Of the slots that the next `blocks` get, those that `prepare` has something to do for."""
        return tuple(slot for slot in self._next(blocks) if not self._store.is_allocated(slot))

    def prepare(self, slots: Sequence[int]) -> None:
        """Have the store keep room for `slots`, so that `reserve` need not. Raises `OSError`."""
        for slot in slots:
            self._store.allocate(slot)
            self.moved_s = self._clock()

    def put(self, transfer_id: TransferId, blocks: Sequence[memoryview]) -> None:
        """Keep copies of `blocks`. Raises `OSError`."""
        began_s = self._clock()
        for slot, block in zip(self._held[transfer_id], blocks, strict=True):
            self._store.write(slot, block)
            self.moved_s = self._clock()
        self._measured("in", sum(len(block) for block in blocks), self._clock() - began_s)

    def take(self, transfer_id: TransferId) -> list[memoryview]:
        """What was put. Raises `OSError`, `Unverified`."""
        began_s = self._clock()
        blocks = []
        for slot in self._held[transfer_id]:
            blocks.append(self._store.read(slot))
            self.moved_s = self._clock()
        self._measured("out", sum(len(block) for block in blocks), self._clock() - began_s)
        return blocks

    def free(self, transfer_id: TransferId) -> None:
        """Give its room back. Idempotent."""
        slots = self._held.pop(transfer_id, ())
        if slots:
            self._store.drop(slots, last=not self._held)
            self._free.extend(slots)

    def trim(self) -> None:
        """Give back the room of slots, after all were freed. Raises `OSError`."""
        self._store.trim()

    def failed(self) -> None:
        """It could not keep what it had promised room for: leave it alone for a while."""
        self._away_s = min(max(_FIRST_AWAY_S, 2 * self._away_s), _LONGEST_AWAY_S)
        self._away_until_s = self._clock() + self._away_s

    def worked(self) -> None:
        """It kept something, and gave it back."""
        self._away_s = 0.0

    def check(self) -> None:
        """Raise `AssertionError` unless each slot is in exactly one place."""
        held = [slot for slots in self._held.values() for slot in slots]
        assert sorted([*self._free, *held]) == list(range(self._fresh)), "slots lost or doubled"
        assert self._fresh <= self._slots, "slots that are not there"

    def close(self) -> None:
        """Leave nothing behind."""
        self._store.close()

    @property
    def _free_slots(self) -> int:
        return len(self._free) + self._slots - self._fresh

    def _next(self, blocks: int) -> tuple[int, ...]:
        """The slots that the next to reserve so many gets, those that were used before first."""
        used = tuple(islice(self._free, blocks))
        end = min(self._slots, self._fresh + blocks - len(used))
        return (*used, *range(self._fresh, end))

    def _measured(self, way: str, n_bytes: int, took_s: float) -> None:
        if n_bytes < _LEAST_BYTES or took_s <= 0:
            return
        seen, before = n_bytes / took_s, self._rates.get(way)
        self._rates[way] = seen if before is None else before + _NEW * (seen - before)


class HostStore:
    """Blocks in this process's own memory, taken as they come."""

    def __init__(self) -> None:
        self._kept: dict[int, bytes] = {}

    def allocate(self, slot: int) -> None:
        """Memory is there, or the process is not."""

    def write(self, slot: int, block: memoryview) -> None:
        """Keep a copy."""
        self._kept[slot] = bytes(block)

    def read(self, slot: int) -> memoryview:
        """What was written; valid for as long as it is held."""
        return memoryview(self._kept[slot])

    def is_allocated(self, slot: int) -> bool:
        """As far as anybody can know."""
        return True

    def trim(self) -> None:
        """What was kept is gone already."""

    def drop(self, slots: Sequence[int], *, last: bool) -> None:
        """Forget what they hold."""
        for slot in slots:
            self._kept.pop(slot, None)

    def close(self) -> None:
        """Forget everything."""
        self._kept.clear()

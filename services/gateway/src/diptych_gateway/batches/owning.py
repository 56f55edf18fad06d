"""A batch's record in the hands of the gateway that runs it: every write renews the lease.

A write that loses its compare-and-swap reads back: the owner is the same (a client asked for a
cancel) → merge and go on; another → the batch is somebody else's now.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from diptych_bus.port import Bus, Kept
from diptych_contracts.batches import BatchRecord, BatchState
from diptych_contracts.errors import Conflict, Transient
from diptych_contracts.ids import Incarnation
from diptych_contracts.streams import FILE_TTL_S
from diptych_gateway.files.board import Board
from diptych_policy.batches import LEASE_S, is_free

_PAUSE_S = 0.25
_LEAVE_S = 1.0

T = TypeVar("T")
Change = Callable[[BatchRecord], BatchRecord]


class LeaseLost(Exception):
    """Another gateway has taken the batch over, or it is gone."""


async def patiently(act: Callable[[], Awaitable[T]]) -> T:
    """What `act` gives, once the bus is there."""
    while True:
        try:
            return await act()
        except Transient:
            await asyncio.sleep(_PAUSE_S)


class Ownership:
    """One batch, owned.

    Args:
        bus: Its clock is the one all gateways share.
        board: Where batches are.
        me: The owner.
        kept: The record as it was taken over.
    """

    def __init__(
        self, bus: Bus, board: Board[BatchRecord], me: Incarnation, kept: Kept[BatchRecord]
    ) -> None:
        self._bus = bus
        self._board = board
        self._me = me
        self._kept = kept
        self._lock = asyncio.Lock()

    @property
    def record(self) -> BatchRecord:
        """As it stands."""
        return self._kept.value

    @property
    def cancelling(self) -> bool:
        """Whether a client wants it to stop."""
        return self.record.state is BatchState.CANCELLING

    def unix_ms(self) -> int:
        """The server's time."""
        return self._bus.unix_ms()

    async def look(self) -> None:
        """See whether a client has asked for a cancel.

        Raises:
            LeaseLost: see above.
            Transient: the bus is away.
        """
        async with self._lock:
            await self._read()

    async def change(self, change: Change) -> None:
        """Write what `change` makes of the record, and renew the lease; waits for the bus.

        Raises:
            LeaseLost: see above.
        """
        async with self._lock:
            while True:
                record = msgspec.structs.replace(
                    change(self.record),
                    owner=self._me,
                    owned_until_unix_ms=self.unix_ms() + int(LEASE_S * 1000),
                )
                with suppress(Conflict):
                    await patiently(lambda record=record: self._write(record))  # type: ignore[misc]
                    return
                await patiently(self._read)

    async def leave(self) -> None:
        """Let another gateway take it over at once, as far as the bus is there."""
        record = msgspec.structs.replace(self.record, owner=None, owned_until_unix_ms=0)
        with suppress(Transient, Conflict, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._write(record)

    async def _write(self, record: BatchRecord) -> None:
        key = record.batch_id
        bucket = self._board.bucket
        revision = await bucket.update(key, record, self._kept.revision, ttl_s=FILE_TTL_S)
        self._kept = Kept(key, record, revision)
        self._board.note(self._kept)

    async def _read(self) -> None:
        kept = await self._board.bucket.get(self.record.batch_id)
        if kept is None or kept.value.owner != self._me:
            raise LeaseLost(self.record.batch_id)
        self._kept = kept


async def take_over(
    bus: Bus, board: Board[BatchRecord], me: Incarnation, batch_id: str
) -> Ownership | None:
    """The batch, owned by `me`; None if it is not free (any more).

    Raises:
        Transient: the bus is away.
    """
    kept = await board.bucket.get(batch_id)
    now = bus.unix_ms()
    if kept is None or not is_free(kept.value, now_unix_ms=now):
        return None
    record = msgspec.structs.replace(
        kept.value,
        owner=me,
        owned_until_unix_ms=now + int(LEASE_S * 1000),
        adoptions=kept.value.adoptions + 1,
    )
    try:
        revision = await board.bucket.update(batch_id, record, kept.revision, ttl_s=FILE_TTL_S)
    except Conflict:
        return None
    return Ownership(bus, board, me, Kept(batch_id, record, revision))

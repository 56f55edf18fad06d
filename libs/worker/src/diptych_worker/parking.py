"""Handed-over KV that waits outside the engine until there is a seat for its sequence.

    reserved  room is kept in a lot; its ticket is being written      (`reserve`)
    claimed   verified, in the transfer slots; copied into the lot    (`hold`)
    in line   the transfer slots are free; waits for a seat, in order
    seated    read back, verified again, and given to the engine

From `claimed` on nothing of it depends on its prefill worker. Whatever ends it on the way (a
cancel, its deadline, a drain cut off) frees its room and its place in the line. A lot that cannot
keep what it promised room for is left alone for a while, and what was to be kept there stays in
memory: never more than was in the transfer slots at that moment.

A lot that may block is touched on its own thread only. One that has not moved a block for long is
given up: it is out of order until that thread is back, and what it was busy with is freed then.
"""

import asyncio
import contextlib
import errno
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from diptych_contracts.errors import Refused, Unverified
from diptych_contracts.fleet import ParkingRoom
from diptych_contracts.ids import RequestId, TransferId
from diptych_contracts.jobs import DecodeJob, RefusalReason
from diptych_engine.port import KvBlock
from diptych_kvlink.claiming import IncomingBlock
from diptych_kvlink.parking import Lot
from diptych_kvlink.verifying import Mismatch, checksum, context_salt
from diptych_policy.drain_rate import DrainRate
from diptych_policy.job_admission import JobAdmission
from diptych_telemetry import logger, names, tracer
from diptych_worker.attempts import Attempt
from diptych_worker.metering import WorkerMetrics

log = logger("worker")
spans = tracer("worker")

T = TypeVar("T")
Kept = list[memoryview]

STUCK_S = 10.0
"""A block that takes longer does not come."""
ROOM_S = 5.0
"""For room to be kept; its prefill asks for so long, and longer."""
_LOOK_S = 0.5


class Parking:
    """The lots of one worker, and the line before its engine.

    Args:
        lots: By kind; none: nothing parks here.
        admission: Seats, and who stands in line for one.
        model_base: `Fingerprint.base` of the model.
        metrics: Told of everything.
        now_s: Monotonic seconds.
    """

    def __init__(
        self,
        lots: Mapping[str, Lot],
        admission: JobAdmission,
        *,
        model_base: str,
        metrics: WorkerMetrics,
        now_s: Callable[[], float],
    ) -> None:
        self._lots = dict(lots)
        self._admission = admission
        self._model_base = model_base
        self._metrics = metrics
        self._now_s = now_s
        self._lot_of: dict[TransferId, Lot] = {}
        self._moving: dict[TransferId, asyncio.Future[Any]] = {}
        """What a lot's thread is busy with, or was."""
        self._seats: dict[tuple[RequestId, int], asyncio.Future[None]] = {}
        self._seat_rate = DrainRate()
        self._threads = {
            kind: ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kv-parking-{kind}")
            for kind in lots
        }

    @property
    def rooms(self) -> tuple[ParkingRoom, ...]:
        """What there is, and how full it is."""
        return tuple(lot.room for lot in self._lots.values())

    @property
    def seat_gap_s(self) -> float:
        """Mean time between seats that fell free while somebody stood in line; 0: not known."""
        return self._seat_rate.gap_s

    @property
    def has_room(self) -> bool:
        """Whether one block could be kept."""
        return any(room.used_bytes < room.total_bytes for room in self.rooms)

    async def prepare(self, kind: str, blocks: int) -> None:
        """Have the lot of `kind` make room for so many, which a disk may take long for.

        What it cannot do is told by `reserve`.
        """
        lot = self._lots.get(kind)
        slots = () if lot is None or lot.away else lot.lacking(blocks)
        if lot is None or not slots:
            return
        try:
            await self._in_thread(lot, lambda: lot.prepare(slots), within_s=ROOM_S)
        except OSError as err:
            log.warning("no_room_to_park", parking=kind, error=str(err))
            if not lot.away:  # One failure, though several have asked meanwhile.
                lot.failed()

    def reserve(self, kind: str, transfer_id: TransferId, blocks: int) -> None:
        """Keep room in the lot of `kind`, and in no other. Idempotent.

        Raises:
            Refused: `no_room`, or `unsupported` where there is no such lot.
        """
        lot = self._lots.get(kind)
        if lot is None or not blocks:
            offered = " or ".join(self._lots) or "none"
            raise Refused(RefusalReason.UNSUPPORTED, f"no parking on {kind!r}: there is {offered}")
        if self._lot_of.get(transfer_id, lot) is not lot:
            self.free(transfer_id)
        try:
            lot.reserve(transfer_id, blocks)
        except Refused:
            self._metrics.parking_fault(kind, "full")
            raise
        self._lot_of[transfer_id] = lot

    def free(self, transfer_id: TransferId) -> None:
        """Nothing of it is kept here any more. Idempotent."""
        lot, moving = self._lot_of.pop(transfer_id, None), self._moving.pop(transfer_id, None)
        if lot is None:
            return
        if moving is None or moving.done():
            self._free(lot, transfer_id)
        else:  # Its lot hangs: until it does not, its slots are nobody else's.
            moving.add_done_callback(lambda _moved: self._free(lot, transfer_id))

    def _free(self, lot: Lot, transfer_id: TransferId) -> None:
        lot.free(transfer_id)
        if lot.is_empty:
            with contextlib.suppress(RuntimeError):  # It is closed.
                trimming = self._threads[lot.kind].submit(lot.trim)
                trimming.add_done_callback(lambda done: _note_trimmed(lot.kind, done))

    async def hold(
        self,
        attempt: Attempt,
        job: DecodeJob,
        blocks: Sequence[IncomingBlock],
        *,
        copied: Callable[[], None],
    ) -> list[KvBlock]:
        """Keep claimed `blocks`, wait for a seat, and give what its engine imports.

        Args:
            attempt: Which may be cancelled meanwhile, by its task.
            job: Its job.
            blocks: In the transfer slots.
            copied: Told when those are needed no more.

        Raises:
            Refused: (`no_room`) the engine is gone.
            Unverified: what came back is not what was kept; nothing may be decoded from it.
        """
        lot, began_s = self._lot_of[job.transfer_id], self._now_s()
        outcome = "dropped"
        attempt.parked = True
        with spans.start_as_current_span(names.KV_PARK) as span:
            span.set_attribute(names.PARKING, lot.kind)
            span.set_attribute(names.TRANSFER_BYTES, sum(len(block.data) for block in blocks))
            try:
                kept = await self._put(lot, job.transfer_id, [block.data for block in blocks])
                copied()
                await self._seat(attempt)
                attempt.parked_s = self._now_s() - began_s
                found = await self._take(lot, job, blocks, kept=kept)
                outcome = "seated"
                return found
            except Unverified as err:
                outcome = "corrupt"
                span.set_attribute(names.KV_REFUSED, str(err.reason))
                raise
            finally:
                attempt.parked = False
                self.free(job.transfer_id)
                self._metrics.parked(lot.kind, outcome, self._now_s() - began_s)

    def advance(self) -> None:
        """Seat whoever can be; to be called when a seat may have fallen free, and now and then."""
        gone = self._admission.out_of_order
        while (key := self._admission.seat_next()) is not None:
            self._seat_rate.served(now_s=self._now_s())
            seated = self._seats.get(key)
            if seated is not None and not seated.done():
                seated.set_result(None)
        for seated in self._seats.values():
            if gone and not seated.done():
                seated.set_exception(Refused(RefusalReason.NO_ROOM, gone))
        self._seat_rate.tick(waiting=self._admission.line > 0, now_s=self._now_s())

    def close(self) -> None:
        """Leave nothing behind."""
        for kind, lot in self._lots.items():
            self._threads[kind].shutdown(wait=not lot.hangs, cancel_futures=True)
            lot.close()

    async def _seat(self, attempt: Attempt) -> None:
        key = (attempt.key.request_id, attempt.key.attempt)
        seated = self._seats[key] = asyncio.get_running_loop().create_future()
        self._admission.line_up(*key)
        self.advance()
        try:
            await seated
        finally:
            del self._seats[key]

    async def _put(self, lot: Lot, transfer_id: TransferId, blocks: Kept) -> Kept | None:
        """Copies of `blocks`, if the lot could not keep them."""

        def put() -> Kept | None:
            try:
                lot.put(transfer_id, blocks)
            except OSError as err:
                log.warning("kv_not_parked", parking=lot.kind, error=str(err))
                return in_memory()
            return None

        def in_memory() -> Kept:
            return [memoryview(bytes(block)) for block in blocks]

        try:
            kept = await self._in_thread(lot, put, transfer_id)
        except OSError as err:
            log.warning("kv_not_parked", parking=lot.kind, error=str(err))
            kept = await asyncio.to_thread(in_memory)
        if kept is not None:
            lot.failed()
            self._metrics.parking_fault(lot.kind, "write")
        return kept

    async def _take(
        self, lot: Lot, job: DecodeJob, blocks: Sequence[IncomingBlock], *, kept: Kept | None
    ) -> list[KvBlock]:
        salt = context_salt(job.generation, self._model_base)

        def take() -> list[KvBlock]:
            found = lot.take(job.transfer_id) if kept is None else kept
            return [_verified(block, data, salt) for block, data in zip(blocks, found, strict=True)]

        try:
            if kept is None:
                taken = await self._in_thread(lot, take, job.transfer_id)
            else:  # It is in memory; the lot's thread may hang.
                taken = await asyncio.to_thread(take)
        except OSError as err:
            lot.failed()
            self._metrics.parking_fault(lot.kind, "read")
            text = f"{job.transfer_id} cannot be read back from {lot.kind}: {err.strerror}"
            raise Unverified(text, reason=Mismatch.CHECKSUM) from err
        except Unverified as err:
            self._metrics.parking_fault(lot.kind, "corrupt")
            self._metrics.kv_refused(err.reason)
            raise
        if kept is None:
            lot.worked()
        return taken

    async def _in_thread(
        self,
        lot: Lot,
        work: Callable[[], T],
        transfer_id: TransferId | None = None,
        *,
        within_s: float | None = None,
    ) -> T:
        """Off the event loop, and to its end: till then what it touches is nobody else's.

        Raises:
            OSError: it hangs: no block has moved for `within_s`. What it touches is freed later.
        """
        within_s = STUCK_S if within_s is None else within_s
        moving = asyncio.get_running_loop().run_in_executor(self._threads[lot.kind], work)
        if transfer_id is not None:
            self._moving[transfer_id] = moving
        try:
            await self._ended(lot, moving, within_s)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await self._ended(lot, moving, within_s)
            _ = moving.done() and not moving.cancelled() and moving.exception()  # It is seen.
            raise
        return await moving

    async def _ended(self, lot: Lot, moving: asyncio.Future[Any], within_s: float) -> None:
        """Looks are counted, not seconds: a process that stood still saw its disk for none."""
        moved_s, left_s = lot.moved_s, within_s
        while not (await asyncio.wait([moving], timeout=_LOOK_S))[0]:
            left_s = within_s if lot.moved_s != moved_s else left_s - _LOOK_S
            moved_s = lot.moved_s
            if left_s <= 0:
                lot.hangs = True
                moving.add_done_callback(lambda moved: _back(lot, moved))
                raise OSError(errno.ETIMEDOUT, f"{lot.kind} has moved nothing for {within_s:g} s")


def _back(lot: Lot, moved: asyncio.Future[Any]) -> None:
    lot.hangs = False
    if not moved.cancelled() and moved.exception() is not None:
        log.warning("parking_hung", parking=lot.kind, error=str(moved.exception()))


def _note_trimmed(kind: str, trimming: Future[None]) -> None:
    if not trimming.cancelled() and (err := trimming.exception()) is not None:
        log.warning("parking_not_trimmed", parking=kind, error=str(err))


def _verified(block: IncomingBlock, data: memoryview, salt: int) -> KvBlock:
    seen, expected = checksum(data, salt), block.digest.checksum
    if seen != expected:
        raise Unverified(
            f"{block.packing.transfer_id}: block {block.digest.index} came back from parking with "
            f"checksum {seen:016x}, expected {expected:016x}",
            reason=Mismatch.CHECKSUM,
        )
    return KvBlock(p0=block.p0, p1=block.p1, data=block.packing.unpack(data, block.digest))

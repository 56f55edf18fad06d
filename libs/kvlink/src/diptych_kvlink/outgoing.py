"""The writer's side of one transfer: blocks out, digests back.

Structurally an engine's `BlockSink`. Three threads meet here: the engine's calls `buffer` and
`written` and must never wait or fail because of a peer; the link's sends and computes checksums
while the engine computes the next chunk; the event loop's waits in `digests`, and closes.

So a transfer that must not be written any more (lease over, slot closed by its reader, link
closed) does not raise on the engine's thread: its blocks go to a scratch buffer, and `digests`
raises the reason.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

from diptych_contracts.errors import DiptychError, Expired, Refused, Unverified
from diptych_contracts.ids import TransferId
from diptych_contracts.jobs import BlockDigest, RefusalReason
from diptych_contracts.transfers import Ticket
from diptych_kvlink.ledger import State, Transfer
from diptych_kvlink.port import LinkWriter
from diptych_kvlink.verifying import checksum


class OutgoingTransfer:
    """Writes the blocks of one ticket.

    Args:
        ticket: Leave to write.
        link: The ticket's endpoint, opened.
        thread: The link's thread: an executor with one worker.
        sent_s: When the `Reserve` that the ticket answers was *sent*, on `clock`. The lease is
            counted from there, so it is over here before it is over at the reader.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ticket: Ticket,
        link: LinkWriter,
        *,
        thread: Executor,
        sent_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ticket = ticket
        self._link = link
        self._thread = thread
        self._clock = clock
        self._transfer = Transfer(
            transfer_id=ticket.transfer_id,
            deadline_s=sent_s + ticket.lease_ms / 1000,
        )
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}
        self._digests: dict[int, BlockDigest] = {}
        self._failure: DiptychError | None = None
        self._scratch: bytearray | None = None
        self._done: Future[None] = Future()

    @property
    def transfer_id(self) -> TransferId:
        """The ticket's id."""
        return self._ticket.transfer_id

    @property
    def blocks(self) -> int:
        """How many blocks the ticket is for."""
        return len(self._ticket.slots)

    @property
    def bytes_written(self) -> int:
        """Bytes of the blocks that are final."""
        with self._lock:
            return sum(digest.n_bytes for digest in self._digests.values())

    @property
    def deadline_s(self) -> float:
        """When the lease is over; repeat the `Reserve` and call `renew` before."""
        return self._transfer.deadline_s

    def renew(self, ticket: Ticket, *, sent_s: float) -> None:
        """Take the lease that a `Reserve` repeated at `sent_s` was answered with."""
        with self._lock:
            if ticket.slots == self._ticket.slots:
                self._transfer.renew(sent_s + ticket.lease_ms / 1000)

    def buffer(self, index: int) -> memoryview:
        """Writable memory of a full block for block `index` (engine's thread)."""
        with self._lock:
            if self._may_write(index):
                try:
                    return self._open_buffer(index)
                except Refused as err:
                    self._fail(err)
            if self._scratch is None:
                self._scratch = bytearray(self._ticket.layout.slot_bytes)
            return memoryview(self._scratch)

    def written(self, index: int, n_bytes: int) -> None:
        """Block `index` is final and lies in its buffer (engine's thread)."""
        with self._lock:
            view = self._views.get(index)
            if view is None or not self._may_write(index):
                return
            if not 0 < n_bytes <= len(view):
                self._fail(Unverified(f"{self.transfer_id}: block {index} of {n_bytes} bytes"))
                return
            try:
                self._thread.submit(self._seal, index, view[:n_bytes].toreadonly())
            except RuntimeError:  # The executor was shut down.
                self._fail(Refused(RefusalReason.UNKNOWN_TICKET, "the link is closed"))

    async def digests(self, timeout_s: float) -> tuple[BlockDigest, ...]:
        """Every block's digest, once all have been written and sent.

        Raises:
            Expired: `timeout_s` or the lease ran out.
            Refused: the reader has closed the ticket's slots.
            Unverified: the link broke, or the engine produced blocks the ticket is not for.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(asyncio.wrap_future(self._done))
        except TimeoutError as err:
            raise Expired(
                f"{self.transfer_id}: {len(self._digests)} of {self.blocks} blocks were written "
                f"in {timeout_s:.3f} s"
            ) from err
        if self._failure is not None:
            raise self._failure
        return tuple(self._digests[index] for index in range(self.blocks))

    def close(self) -> bool:
        """Take the buffers back and tell the reader so. To be called until it gives True.

        False: an export still uses a buffer. Only after True may `Release` be sent, this worker's
        word that nothing will be written any more. Call it after the engine has reported the end
        of the sequence: an engine that starts on a buffer taken back dies of a `ValueError`.
        """
        with self._lock:
            self._fail(Refused(RefusalReason.CANCELLED, f"{self.transfer_id} was closed"))
            self._transfer.end(State.RELEASED, "closed")
            for index, view in tuple(self._views.items()):
                try:
                    view.release()
                except BufferError:
                    continue
                del self._views[index]
                self._link.stop(self._ticket.slots[index])
            self._transfer.writer_may_write = bool(self._views)
            return not self._views

    def _may_write(self, index: int) -> bool:
        if self._transfer.expire(self._clock()):
            self._fail(Expired(f"{self.transfer_id}: {self._transfer.reason}"))
        if not 0 <= index < self.blocks:
            self._fail(Unverified(f"{self.transfer_id}: block {index} of {self.blocks}"))
        return self._failure is None and self._transfer.is_open

    def _open_buffer(self, index: int) -> memoryview:
        if index not in self._views:
            self._views[index] = self._link.buffer(self._ticket.slots[index])
        if self._transfer.state is State.RESERVED:
            self._transfer.advance(State.WRITING, deadline_s=self._transfer.deadline_s)
        return self._views[index]

    def _seal(self, index: int, data: memoryview) -> None:
        try:
            self._link.send(self._ticket.slots[index], len(data))
            digest = BlockDigest(index=index, n_bytes=len(data), checksum=checksum(data))
        except Exception as err:  # On this thread nobody else would ever hear of it.
            known = err if isinstance(err, DiptychError) else None
            with self._lock:
                self._fail(known or Unverified(f"{self.transfer_id}: block {index}: {err!r}"))
            return
        finally:
            data.release()
        with self._lock:
            self._digests[index] = digest
            if len(self._digests) == self.blocks and self._failure is None:
                self._transfer.advance(State.WRITTEN, deadline_s=self._transfer.deadline_s)
                self._finish()

    def _fail(self, failure: DiptychError) -> None:
        """Remember the first failure. A transfer that is complete cannot fail any more."""
        if not self._done.done():
            self._failure = failure
            self._transfer.end(State.FAILED, str(failure))
            self._finish()

    def _finish(self) -> None:
        self._done.set_result(None)

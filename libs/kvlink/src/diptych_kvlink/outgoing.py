"""The writer's side of one transfer: blocks out, digests back.

Structurally an engine's `BlockSink`. Three threads meet here: the engine's calls `buffer` and
`written` and must never wait or fail because of a peer; the link's sends and computes checksums
while the engine computes the next chunk; the event loop's waits in `digests`, and closes.

Encoding and sealing (`packing`), where the ticket says so, are the link's thread's work too: while
it writes into a buffer, `close` says so. What is to be sealed is exported into private memory
first, so that a slot others can read never holds it in the clear.

Blocks that become final while the link is busy go out together, in one batch: many small ones cost
one exchange, and a big one waits for nobody. What waits is bounded by the ticket's slots.

So a transfer that must not be written any more (lease over, slot closed by its reader, link
closed) does not raise on the engine's thread: its blocks go to a scratch buffer, and `digests`
raises the reason.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace

from diptych_contracts.errors import DiptychError, Expired, LinkBroken, Refused, Unverified
from diptych_contracts.ids import TransferId
from diptych_contracts.jobs import BlockDigest, RefusalReason
from diptych_contracts.tickets import TicketSeal
from diptych_contracts.transfers import SlotRef, Ticket
from diptych_contracts.wire import encode
from diptych_kvlink.batching import take_batch
from diptych_kvlink.ledger import State, Step, Transfer
from diptych_kvlink.overlap import Overlap
from diptych_kvlink.packing import Packed, Packing
from diptych_kvlink.port import LinkWriter

LOOK_S = 0.25
"""How often who waits looks whether the reader is still there."""


class OutgoingTransfer:
    """Writes the blocks of one ticket.

    Args:
        ticket: Leave to write.
        link: The ticket's endpoint, opened.
        thread: The link's thread: an executor with one worker.
        sent_s: When the `Reserve` that the ticket answers was *sent*, on `clock`. The lease is
            counted from there, so it is over here before it is over at the reader.
        salt: Of the context whose KV it carries (`verifying.context_salt`).
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ticket: Ticket,
        link: LinkWriter,
        *,
        thread: Executor,
        sent_s: float,
        salt: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ticket, self._shown = ticket, _shown(ticket)
        self._salt = salt
        self._packing = Packing.of(ticket)
        self._link = link
        self._thread = thread
        self._clock = clock
        self._transfer = Transfer(
            transfer_id=ticket.transfer_id,
            deadline_s=sent_s + ticket.lease_ms / 1000,
            opened_s=clock(),
            clock=clock,
        )
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}
        self._private: dict[int, memoryview] = {}
        self._held: set[int] = set()
        """Buffers the link's thread may be writing into."""
        self._waiting: deque[tuple[int, memoryview]] = deque()
        self._sending = False
        self.overlap = Overlap()
        """How much of it ran while the engine computed."""
        self.packing_s = 0.0
        """Seconds the link's thread spent on encoding and sealing."""
        self.sending_s = 0.0
        """Seconds it spent on sending, and on waiting until what it sent had arrived."""
        self._digests: dict[int, BlockDigest] = {}
        self._failure: DiptychError | None = None
        self._scratch: bytearray | None = None
        self._done: Future[None] = Future()
        self.tee: Callable[[int, memoryview], None] | None = None
        """Shown each block before it is encoded and sent, on the link's thread; never raises, and
        keeps no view of it. To be set before the first block."""

    @property
    def transfer_id(self) -> TransferId:
        """The ticket's id."""
        return self._ticket.transfer_id

    @property
    def blocks(self) -> int:
        """How many blocks the ticket is for."""
        return len(self._ticket.slots)

    @property
    def held_blocks(self) -> int:
        """The first block it is for: the reader has those before it."""
        return self._ticket.held_blocks

    @property
    def seal(self) -> TicketSeal | None:
        """The ticket's, for the job that hands it over."""
        return self._ticket.seal

    @property
    def encrypted(self) -> bool:
        """Whether its bytes cross through TLS."""
        return bool(self._ticket.endpoint.certificate)

    @property
    def sealed(self) -> bool:
        """Whether each block is sealed with the ticket's key."""
        return bool(self._ticket.sealing_key)

    @property
    def codec(self) -> str:
        """How its blocks are encoded."""
        return self._ticket.codec

    @property
    def raw_bytes(self) -> int:
        """Bytes of the blocks that are final, before they were encoded."""
        with self._lock:
            return sum(one.raw_bytes or one.n_bytes for one in self._digests.values())

    @property
    def bytes_written(self) -> int:
        """Bytes of the blocks that are final."""
        with self._lock:
            return sum(digest.n_bytes for digest in self._digests.values())

    @property
    def kind(self) -> str:
        """The kind of link it goes over."""
        return self._ticket.endpoint.kind

    @property
    def moving_s(self) -> float:
        """Seconds spent on moving bytes: exports by the engine, and the link's thread's work."""
        return self.overlap.moving_s

    @property
    def state(self) -> str:
        """Where it stands (`ledger.State`)."""
        return self._transfer.state

    @property
    def steps(self) -> tuple[Step, ...]:
        """The way it went."""
        return tuple(self._transfer.steps)

    def expire(self) -> None:
        """Fail if the lease is over before all was written; to be called now and then.

        So a ticket that the engine never gets to ends here no later than at its reader.
        """
        with self._lock:
            if not self._done.done():
                self._check_lease()

    @property
    def deadline_s(self) -> float:
        """When the lease is over; repeat the `Reserve` and call `renew` before."""
        return self._transfer.deadline_s

    def renew(self, ticket: Ticket, *, sent_s: float) -> None:
        """Take the lease that a `Reserve` repeated at `sent_s` was answered with."""
        with self._lock:
            if ticket.slots == self._ticket.slots:
                self._transfer.renew(sent_s + ticket.lease_ms / 1000)
                self._ticket, self._shown = ticket, _shown(ticket)

    def buffer(self, index: int) -> memoryview:
        """Writable memory of a full block for block `index` (engine's thread)."""
        with self._lock:
            self.overlap.export_began(
                self._clock(), last=index - self.held_blocks == self.blocks - 1
            )
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
            self.overlap.export_ended(self._clock())
            self._waiting.append((index, self._private.pop(index, view)[:n_bytes]))
            if not self._sending:
                self._submit()

    @property
    def failure(self) -> DiptychError | None:
        """Why nothing of it counts; None while it may still be handed over."""
        return self._failure

    def reader_is_gone(self) -> bool:
        """Whether the link knows by now that nobody is there to be written to. Does not block."""
        return self._link.reader_is_gone()

    def look(self) -> None:
        """Fail if the reader is gone: to be called every `LOOK_S`, for nobody may be sending."""
        if self.reader_is_gone():
            with self._lock:
                self._fail(LinkBroken(f"{self.transfer_id}: its reader is gone"))

    async def digests(self, timeout_s: float) -> tuple[BlockDigest, ...]:
        """Every block's digest, once all have been written and sent.

        Raises:
            Expired: `timeout_s` or the lease ran out.
            Refused: the reader has closed the ticket's slots.
            LinkBroken: the link failed, or its reader is gone.
            Unverified: the engine produced blocks the ticket is not for.
        """
        try:
            async with asyncio.timeout(timeout_s):
                done = asyncio.wrap_future(self._done)
                while not (await asyncio.wait({done}, timeout=LOOK_S))[0]:
                    self.look()
        except TimeoutError as err:
            raise Expired(
                f"{self.transfer_id}: {len(self._digests)} of {self.blocks} blocks were written "
                f"in {timeout_s:.3f} s"
            ) from err
        if self._failure is not None:
            raise self._failure
        return tuple(self._digests[index] for index in sorted(self._digests))

    def close(self) -> bool:
        """Take the buffers back and tell the reader so. To be called until it gives True.

        False: an export still uses a buffer, or the link still sends it. Only after True may
        `Release` be sent, this worker's word that nothing will be written any more. Call it after
        the engine has reported the end of the sequence: an engine that starts on a buffer taken
        back dies of a `ValueError`.
        """
        with self._lock:
            self._fail(Refused(RefusalReason.CANCELLED, f"{self.transfer_id} was closed"))
            self._transfer.end(State.RELEASED, "closed")
            self._private.clear()
            for index in tuple(self._views):
                self._let_go(index)
            self._transfer.writer_may_write = bool(self._views)
            return not self._views

    def _check_lease(self) -> None:
        if self._transfer.expire(self._clock()):
            self._fail(Expired(f"{self.transfer_id}: {self._transfer.reason}"))

    def _may_write(self, index: int) -> bool:
        self._check_lease()
        if not 0 <= index - self.held_blocks < self.blocks:
            blocks = f"{self.blocks} from block {self.held_blocks} on"
            self._fail(Unverified(f"{self.transfer_id}: block {index} of {blocks}"))
        return self._failure is None and self._transfer.is_open

    def _slot(self, index: int) -> SlotRef:
        return self._ticket.slots[index - self.held_blocks]

    def _open_buffer(self, index: int) -> memoryview:
        if index not in self._views:
            self._views[index] = self._link.buffer(self._slot(index))
        if self._transfer.state is State.RESERVED:
            self._transfer.advance(State.WRITING, deadline_s=self._transfer.deadline_s)
        if not self._packing.sealing_key:
            return self._views[index]
        if index not in self._private:
            self._private[index] = memoryview(bytearray(len(self._views[index])))
        return self._private[index]

    def _submit(self) -> None:
        try:
            self._thread.submit(self._send_waiting)
            self._sending = True
        except RuntimeError:  # The executor was shut down.
            self._fail(Refused(RefusalReason.UNKNOWN_TICKET, "the link is closed"))

    def _send_waiting(self) -> None:
        """Send one batch of what waits; on the link's thread, where transfers take turns."""
        with self._lock:
            batch = take_batch(self._waiting)
            if not self._packing.is_plain:
                self._held.update(index for index, _ in batch)
            self.overlap.batch_began(self._clock())
        digests: list[BlockDigest] = []
        try:
            if batch:
                self._show(batch)
                digests = self._seal(batch)
        except Exception as err:  # On this thread nobody else would ever hear of it.
            known = err if isinstance(err, DiptychError) else None
            with self._lock:
                self._fail(known or Unverified(f"{self.transfer_id}: {err!r}"))
        finally:
            for _, data in batch:
                data.release()
        with self._lock:
            self.overlap.batch_ended(self._clock())
            self._held.clear()
            self._arrived(digests)
            self._sending = False
            if self._waiting:
                self._submit()

    def _show(self, batch: list[tuple[int, memoryview]]) -> None:
        if self.tee is not None:
            for index, data in batch:
                self.tee(index, data)

    def _pack(self, index: int, data: memoryview) -> Packed:
        packed = self._packing.pack(index, data)
        if not packed.seal:
            return packed
        target = self._views[index][: len(packed.data)]  # `_held` keeps it.
        target[:] = packed.data
        return replace(packed, data=target)

    def _seal(self, batch: list[tuple[int, memoryview]]) -> list[BlockDigest]:
        began_s = self._clock()
        packed: list[Packed] = []
        blocks: list[tuple[SlotRef, memoryview]] = []
        try:
            packed += (self._pack(index, data) for index, data in batch)
            packed_s = self._clock()
            blocks += ((self._slot(one.index), one.data.toreadonly()) for one in packed)
            self._link.send(blocks, self._shown)
            digests = [one.digest(self._salt) for one in packed]
            self._link.confirm()
        finally:
            for _, sent in blocks:
                sent.release()
            for one in packed:
                one.data.release()
        self.packing_s += packed_s - began_s
        self.sending_s += self._clock() - packed_s
        return digests

    def _arrived(self, digests: list[BlockDigest]) -> None:
        for digest in digests:
            self._digests[digest.index] = digest
            self._let_go(digest.index)
        if len(self._digests) == self.blocks and not self._done.done():
            self._transfer.advance(State.WRITTEN, deadline_s=self._transfer.deadline_s)
            self._done.set_result(None)

    def _let_go(self, index: int) -> None:
        """Take a buffer back, unless an export still has a pointer on it, or the link reads it."""
        view = self._views.get(index)
        if view is None or index in self._held or self._link.is_sending(self._slot(index)):
            return
        try:
            view.release()
        except BufferError:
            return
        del self._views[index]
        self._link.stop(self._slot(index))

    def _fail(self, failure: DiptychError) -> None:
        """Remember the first failure. A transfer that is complete cannot fail any more."""
        if not self._done.done():
            self._failure = failure
            self._waiting.clear()
            self._transfer.end(State.FAILED, str(failure))
            self._done.set_result(None)


def _shown(ticket: Ticket) -> bytes:
    """What a link shows of a ticket with what is written under it."""
    return b"" if ticket.seal is None else encode(ticket.seal)

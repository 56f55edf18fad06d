"""The reader's side: tickets out, verified blocks in. Fails closed.

Life of a ticket: `reserve` → (the writer fills its slots) → `claim` → (the engine imports) →
`release`. The states are `ledger`'s. Three voices can end a ticket, and each frees only what it can
answer for:

- the reader itself: `release` once it has imported a claimed ticket or given one up;
- the writer: its `Release` message is passed to `writer_stopped`;
- time: `sweep`, on a timer of its own, needs no traffic. It also looks whether the writer of an
  ended ticket has a slot open (the link knows) or is dead, so no lost message leaks a slot.

All links write into one set of slots, so each further link costs no memory. A ticket is open on one
link at a time; on the others its slots are closed.

Everything here is called from one thread (the event loop's).
"""

from dataclasses import dataclass

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.control import KvTransfer
from diptych_contracts.errors import Incompatible, Refused, Unverified
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import BlockDigest, DecodeJob, Generation, RefusalReason
from diptych_contracts.transfers import LinkEndpoint, Reserve, SlotRef, Ticket
from diptych_kvlink.agreement import check_fingerprint, check_layout
from diptych_kvlink.ledger import State, Transfer, TransferLedger
from diptych_kvlink.links import DEFAULT_LINKS, LinkSettings, open_targets
from diptych_kvlink.listing import held, over
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.port import CLOSED, LinkTarget
from diptych_kvlink.slots import SlotPool
from diptych_kvlink.verifying import (
    Mismatch,
    block_spans,
    check_bytes,
    check_context,
    check_holder,
    check_shape,
    context_salt,
    ticket_id,
)


@dataclass(frozen=True, slots=True)
class IncomingBlock:
    """Verified KV of positions [p0, p1).

    `data` is read-only and valid until `release`, which notices a pointer still held on it (cffi)
    but not a numpy array: release only after the engine has imported it or given it up.
    """

    p0: int
    p1: int
    data: memoryview


class IncomingTransfers:
    """The transfers into one worker, and the slots they go through.

    Args:
        layout: What the engine here imports.
        slots: How many blocks can be on their way at once.
        lease_s: How long each open state of a ticket lasts; a repeated `Reserve` renews it.
        name: This worker's incarnation.
        links: Over which links; they share the slots.
        fingerprint: The model here; None leaves that check to the caller.

    Raises:
        Permanent: not enough shared memory, or nowhere to listen.
    """

    def __init__(
        self,
        layout: KvLayout,
        *,
        slots: int,
        lease_s: float,
        name: str,
        links: LinkSettings = DEFAULT_LINKS,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self._layout = layout
        self._lease_s = lease_s
        self._fingerprint = fingerprint
        shape = PoolShape(slots=slots, slot_bytes=layout.slot_bytes)
        self._targets = open_targets(links, name=name, shape=shape)
        self._via: dict[TransferId, LinkTarget] = {}
        self._slots = SlotPool(slots)
        self._ledger = TransferLedger()
        self._refs: dict[TransferId, tuple[SlotRef, ...]] = {}
        self._views: dict[TransferId, list[memoryview]] = {}
        self._done_reading: set[TransferId] = set()
        self._cooling: set[TransferId] = set()

    @property
    def endpoints(self) -> tuple[LinkEndpoint, ...]:
        """The links that can write to this worker, fastest first."""
        return tuple(target.endpoint for target in self._targets)

    @property
    def slots_total(self) -> int:
        """All transfer slots."""
        return self._slots.total

    @property
    def slots_used(self) -> int:
        """Slots that cannot be given to a new ticket, quarantined ones included."""
        return self._slots.used

    @property
    def slots_quarantined(self) -> int:
        """Slots of ended tickets that somebody may still touch."""
        return self._slots.quarantined

    def reserve(self, request: Reserve, *, tokens: int, now_s: float) -> Ticket:
        """Leave to write the KV of `tokens` tokens. The same request again renews the lease.

        The same over another link moves the ticket there, by which its writer says that it does
        not use the first one.

        Raises:
            Refused: `no_room`; `unsupported` link; `expired` if this transfer has ended already.
            Incompatible: layout or model differ; the message names the fields.
        """
        target = self._wanted(request.link)
        self._check_request(request, tokens)
        asked_s = max(self._lease_s, request.lease_ms / 1000)
        lease_s = min(asked_s, request.generation.budget_ms / 1000)
        transfer = self._ledger.get(request.transfer_id)
        if transfer is None or not transfer.is_open:
            transfer = self._open(request, tokens, now_s + lease_s, target)
        elif not self._is_repeat(transfer, request, tokens):
            raise Refused(RefusalReason.UNSUPPORTED, f"{request.transfer_id} is in use")
        elif target is not self._via[transfer.transfer_id]:
            self._close_gates(transfer)
            self._admit(transfer, request.prefill_worker, target)
        transfer.renew(now_s + lease_s)
        return Ticket(
            transfer_id=transfer.transfer_id,
            attempt=request.generation.attempt,
            endpoint=target.endpoint,
            slots=self._refs[transfer.transfer_id],
            layout=self._layout,
            lease_ms=int(lease_s * 1000),
        )

    def claim(self, job: DecodeJob, *, tokens: int, now_s: float) -> tuple[IncomingBlock, ...]:
        """The blocks written under `job`'s ticket, each verified. They cover [0, `tokens`).

        The ticket's slots are closed to the writer first. If anything does not fit, the ticket
        has failed and its slots wait until the writer has closed them.

        Raises:
            Refused: `unknown_ticket`: never given, ended, claimed before, or someone else's.
            Unverified: counts, lengths or checksums do not match; nothing may be decoded.
        """
        transfer = self._claimable(job, now_s)
        deadline_s = now_s + self._lease_s
        self._close_gates(transfer)
        transfer.advance(State.WRITTEN, deadline_s=deadline_s)
        try:
            check_context(transfer, self._claimed_salt(job.generation))
            views = self._verify(transfer, job.blocks, tokens)
        except Unverified as err:
            transfer.end(State.FAILED, str(err))
            self._reader_is_done(transfer)
            raise
        transfer.advance(State.VERIFIED, deadline_s=deadline_s)
        transfer.writer_may_write = False  # It handed over: that is its word.
        spans = block_spans(tokens, self._layout.block_tokens)
        return tuple(
            IncomingBlock(p0=p0, p1=p1, data=view)
            for (p0, p1), view in zip(spans, views, strict=True)
        )

    def is_open(self, transfer_id: TransferId) -> bool:
        """Whether a ticket can still be claimed, or is being imported."""
        transfer = self._ledger.get(transfer_id)
        return transfer is not None and transfer.is_open

    def release(self, transfer_id: TransferId) -> None:
        """This worker is done with a ticket: imported, or given up. Idempotent.

        A ticket given up before its claim has failed; its slots wait until the writer has closed
        them.
        """
        transfer = self._ledger.get(transfer_id)
        if transfer is not None:
            if transfer.state is State.VERIFIED:
                transfer.end(State.RELEASED, "imported")
            transfer.end(State.FAILED, "given up by the reader")
            self._reader_is_done(transfer)

    def writer_stopped(self, transfer_id: TransferId) -> None:
        """The writer said (`Release`) that it writes no more under this ticket. Idempotent.

        A claimed ticket is the reader's: the message, then only late, changes nothing.
        """
        transfer = self._ledger.get(transfer_id)
        if transfer is not None:
            transfer.writer_may_write = False
            if transfer.state is not State.VERIFIED:
                transfer.end(State.RELEASED, "released by the writer")
            self._settle()

    def writer_lost(self, worker: Incarnation) -> list[TransferId]:
        """End `worker`'s unclaimed tickets, since it is silent; gives their ids.

        Silence is not death: slots it had open wait in quarantine until it closes them or the link
        proves that it is dead (looked at now and at each sweep).
        """
        ended = [
            transfer
            for transfer in self._ledger
            if transfer.writer == worker
            and transfer.state is not State.VERIFIED
            and transfer.end(State.FAILED, f"writer {worker} lost")
        ]
        self._bury_dead_writers()
        self._settle()
        return [transfer.transfer_id for transfer in ended]

    def sweep(self, now_s: float) -> list[TransferId]:
        """End what is overdue or whose writer is dead; gives the ids that ended.

        Also looks at everything in quarantine again. To be called a few times a second.
        """
        for transfer in self._ledger:
            # Ended before the last sweep: its gates are closed long enough to trust the marks.
            if transfer.transfer_id in self._cooling and self._is_idle(transfer):
                transfer.writer_may_write = False
        ended = [*self._ledger.expire(now_s), *self._bury_dead_writers()]
        self._settle()
        self._cooling = {t.transfer_id for t in self._ledger if not t.is_open}
        return [transfer.transfer_id for transfer in ended]

    def transfers(self, now_s: float, *, ended: int = 0) -> list[KvTransfer]:
        """Every transfer whose slots are not free yet, and the `ended` last ones that are over."""
        return [
            *(held(transfer, now_s) for transfer in self._ledger),
            *(over(transfer_id, how) for transfer_id, how in self._ledger.ended(ended)),
        ]

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken: a leaked slot, say."""
        self._ledger.check()
        self._slots.check()
        assert self._slots.used == sum(map(len, self._refs.values())), "a slot has no ticket"
        assert {transfer.transfer_id for transfer in self._ledger} == self._refs.keys()

    def close(self) -> None:
        """Give the pool up. Views still in use stay valid until they are dropped."""
        self._views.clear()
        for target in self._targets:
            target.close()

    def _wanted(self, link: str) -> LinkTarget:
        for target in self._targets:
            if target.endpoint.kind == link:
                return target
        offered = " or ".join(repr(endpoint.kind) for endpoint in self.endpoints)
        raise Refused(RefusalReason.UNSUPPORTED, f"link {link!r}; expected {offered}")

    def _check_request(self, request: Reserve, tokens: int) -> None:
        check_layout(self._layout, request.layout)
        if self._fingerprint is not None:
            check_fingerprint(self._fingerprint, request.fingerprint)
        expected = ticket_id(request.generation)
        if request.transfer_id != expected or tokens < 1:
            raise Incompatible(
                f"expected transfer {expected} of at least one token, "
                f"got {request.transfer_id} of {tokens}"
            )
        if request.generation.budget_ms <= 0:
            raise Refused(RefusalReason.EXPIRED, f"{expected} has no time left")

    def _open(
        self, request: Reserve, tokens: int, deadline_s: float, target: LinkTarget
    ) -> Transfer:
        salt = self._salt(request.generation)
        ended = self._ledger.how_ended(request.transfer_id)
        if ended is not None:
            raise Refused(RefusalReason.EXPIRED, f"{request.transfer_id} has ended: {ended}")
        refs = self._slots.take(-(-tokens // self._layout.block_tokens))
        transfer = Transfer(
            transfer_id=request.transfer_id,
            deadline_s=deadline_s,
            writer=request.prefill_worker,
            tokens=tokens,
            salt=salt,
            n_bytes=len(refs) * self._layout.slot_bytes,
            opened_s=deadline_s - min(self._lease_s, request.generation.budget_ms / 1000),
        )
        self._ledger.add(transfer)
        self._refs[transfer.transfer_id] = refs
        self._admit(transfer, request.prefill_worker, target)
        return transfer

    def _is_repeat(self, transfer: Transfer, request: Reserve, tokens: int) -> bool:
        return (
            transfer.state is State.RESERVED
            and transfer.writer == request.prefill_worker
            and transfer.tokens == tokens
            and transfer.salt == self._salt(request.generation)
        )

    def _salt(self, generation: Generation) -> int:
        return context_salt(generation, self._fingerprint.base if self._fingerprint else "")

    def _claimed_salt(self, generation: Generation) -> int:
        """The same of a job: one without any is about another context."""
        try:
            return self._salt(generation)
        except Incompatible as err:
            raise Unverified(str(err), reason=Mismatch.CONTEXT) from err

    def _admit(self, transfer: Transfer, writer: Incarnation, target: LinkTarget) -> None:
        self._via[transfer.transfer_id] = target
        transfer.link = target.endpoint.kind
        target.expect(writer)
        for ref in self._refs[transfer.transfer_id]:
            target.admit(ref.slot, ref.generation, writer)

    def _claimable(self, job: DecodeJob, now_s: float) -> Transfer:
        transfer = self._ledger.get(job.transfer_id)
        if transfer is not None and transfer.expire(now_s):
            self._settle()
        if transfer is None or not transfer.is_open:
            how = self._ledger.how_ended(job.transfer_id) or "never reserved here"
            raise Refused(RefusalReason.UNKNOWN_TICKET, f"{job.transfer_id}: {how}")
        if transfer.state is State.VERIFIED:
            raise Refused(RefusalReason.UNKNOWN_TICKET, f"{job.transfer_id}: claimed before")
        check_holder(transfer, job)
        return transfer

    def _verify(
        self, transfer: Transfer, blocks: tuple[BlockDigest, ...], tokens: int
    ) -> list[memoryview]:
        check_shape(transfer, blocks, tokens=tokens, layout=self._layout)
        views = self._views.setdefault(transfer.transfer_id, [])
        target = self._via[transfer.transfer_id]
        transfer.reader_may_read = True
        for ref, block in zip(self._refs[transfer.transfer_id], blocks, strict=True):
            views.append(target.view(ref.slot, block.n_bytes))
            check_bytes(transfer, block, views[-1])
        transfer.n_bytes = sum(view.nbytes for view in views)
        return views

    def _is_idle(self, transfer: Transfer) -> bool:
        target = self._via[transfer.transfer_id]
        return all(target.is_idle(ref) for ref in self._refs[transfer.transfer_id])

    def _bury_dead_writers(self) -> list[Transfer]:
        ended = []
        for transfer in self._ledger:
            writer, target = transfer.writer, self._via[transfer.transfer_id]
            if writer is not None and transfer.writer_may_write and target.is_dead(writer):
                transfer.writer_may_write = False
                if transfer.end(State.FAILED, f"writer {writer} died"):
                    ended.append(transfer)
        return ended

    def _reader_is_done(self, transfer: Transfer) -> None:
        self._done_reading.add(transfer.transfer_id)
        self._settle()

    def _settle(self) -> None:
        """Close, quarantine and free what the ledger's ended transfers allow."""
        for transfer in self._ledger:
            if not transfer.is_open:
                self._close_gates(transfer)
                self._slots.quarantine(self._refs[transfer.transfer_id])
                if self._via[transfer.transfer_id].stops_writers:
                    transfer.writer_may_write = False
                if transfer.transfer_id in self._done_reading:
                    self._drop_views(transfer)
        for transfer in self._ledger.take_settled():
            self._done_reading.discard(transfer.transfer_id)
            del self._via[transfer.transfer_id]
            self._slots.free(self._refs.pop(transfer.transfer_id))

    def _drop_views(self, transfer: Transfer) -> None:
        """Invalidate the views; one an engine still has a buffer on is left for a later sweep."""
        views = self._views.pop(transfer.transfer_id, [])
        in_use = [view for view in views if not _invalidate(view)]
        transfer.reader_may_read = bool(in_use)
        if in_use:
            self._views[transfer.transfer_id] = in_use

    def _close_gates(self, transfer: Transfer) -> None:
        target = self._via[transfer.transfer_id]
        for ref in self._refs[transfer.transfer_id]:
            target.admit(ref.slot, CLOSED)


def _invalidate(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True

"""What a job that hands KV over must show before anything of it may be decoded. Fails closed."""

from dataclasses import dataclass

from diptych_contracts.errors import Unverified
from diptych_contracts.jobs import BlockDigest, DecodeJob
from diptych_contracts.tickets import TicketFault
from diptych_kvlink.held_slots import HeldSlots
from diptych_kvlink.ledger import State, Transfer, TransferLedger
from diptych_kvlink.packing import Packing
from diptych_kvlink.reserving import Terms
from diptych_kvlink.sealing import BadTicket, TicketOffice
from diptych_kvlink.verifying import block_spans, check_bytes, check_context, check_shape


@dataclass(frozen=True, slots=True)
class IncomingBlock:
    """Verified KV of positions [p0, p1): the bytes that came, encoded and sealed as they are.

    `data` is read-only and valid until `release`, which notices a pointer still held on it (cffi)
    but not a numpy array: release only after the engine has imported it or given it up.
    """

    p0: int
    p1: int
    data: memoryview
    digest: BlockDigest
    packing: Packing

    @property
    def is_plain(self) -> bool:
        """Whether `data` is the block itself."""
        return self.packing.is_plain

    def unpacked(self) -> memoryview:
        """The block itself, opened and decoded in memory of its own; takes milliseconds.

        Raises:
            Unverified: it is not what its ticket allows; nothing may be decoded from it.
        """
        return self.packing.unpack(self.data, self.digest)


@dataclass(frozen=True, slots=True)
class Claims:
    """Turns jobs into verified blocks, for `IncomingTransfers`."""

    terms: Terms
    office: TicketOffice
    ledger: TransferLedger
    held: HeldSlots

    def claim(self, job: DecodeJob, *, tokens: int, now_s: float) -> tuple[IncomingBlock, ...]:
        """See `IncomingTransfers.claim`."""
        transfer = self._claimable(job, now_s)
        deadline_s = now_s + self.terms.lease_s
        self.held.close(transfer)
        transfer.advance(State.WRITTEN, deadline_s=deadline_s)
        try:
            check_context(transfer, self.terms.claimed_salt(job.generation))
            views = self._verify(transfer, job, tokens)
        except Unverified as err:
            transfer.end(State.FAILED, str(err))
            self.held.reader_is_done(transfer)
            raise
        transfer.advance(State.VERIFIED, deadline_s=deadline_s)
        transfer.writer_may_write = False  # It handed over: that is its word.
        spans = block_spans(tokens, self.terms.layout)[transfer.held_blocks :]
        packing = Packing(
            transfer.transfer_id, self.terms.layout, transfer.codec, transfer.sealing_key
        )
        return tuple(
            IncomingBlock(p0=p0, p1=p1, data=view, digest=digest, packing=packing)
            for (p0, p1), view, digest in zip(spans, views, job.blocks, strict=True)
        )

    def _claimable(self, job: DecodeJob, now_s: float) -> Transfer:
        """The open transfer whose ticket `job` shows. Raises `BadTicket`."""
        seal = self.office.check_job(job)
        transfer = self.ledger.get(seal.transfer_id)
        if transfer is not None and transfer.expire(now_s):
            self.held.settle()
        if transfer is None or not transfer.is_open:
            how = self.ledger.how_ended(seal.transfer_id) or "ended long ago"
            late = how.startswith(State.EXPIRED)
            fault = TicketFault.EXPIRED if late else TicketFault.USED
            raise BadTicket(fault, f"{seal.transfer_id}: {how}")
        if transfer.state is State.VERIFIED:
            raise BadTicket(TicketFault.USED, f"{seal.transfer_id}: claimed before")
        self.office.check_current(seal, transfer.slots_digest, now_s=now_s)
        return transfer

    def _verify(self, transfer: Transfer, job: DecodeJob, tokens: int) -> list[memoryview]:
        check_shape(transfer, job.blocks, tokens=tokens, layout=self.terms.layout)
        views = []
        for ref, block in zip(self.held.refs(transfer), job.blocks, strict=True):
            views.append(self.held.view(transfer, ref, block.n_bytes))
            check_bytes(transfer, block, views[-1])
        transfer.n_bytes = sum(view.nbytes for view in views)
        return views

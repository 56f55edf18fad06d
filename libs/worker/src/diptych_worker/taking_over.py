"""The decode side of a hand-off: give tickets, verify, take blocks over."""

import asyncio
from collections.abc import Callable, Sequence

from diptych_contracts.codecs import LOSSY
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.errors import Incompatible, Refused, Unverified
from diptych_contracts.handoffs import MAX_OPAQUE_BYTES, FirstToken, HandOffTerms
from diptych_contracts.ids import Incarnation, RequestId, TransferId, transfer_id
from diptych_contracts.jobs import DecodeJob, Generation, RefusalReason
from diptych_contracts.transfers import (
    Release,
    Released,
    Reserve,
    ReserveAnswer,
    ReserveRefused,
)
from diptych_engine.port import EngineSpec, KvBlock
from diptych_kvlink.agreement import check_fingerprint
from diptych_kvlink.claiming import IncomingBlock
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.sealing import BadTicket
from diptych_policy.job_admission import JobAdmission, NotAdmitted
from diptych_telemetry import logger, names, tracer
from diptych_worker.held_prefixes import HeldPrefixes
from diptych_worker.metering import WorkerMetrics
from diptych_worker.parking import Parking

log = logger("worker")
spans = tracer("worker")


def context_tokens(generation: Generation) -> int:
    """Tokens whose KV a hand-off carries: prompt and delivered answer."""
    return generation.prompt_tokens + len(generation.prefix_ids)


def whole_tokens(generation: Generation) -> int:
    """Most KV cells a generation grows to."""
    return generation.prompt_tokens + generation.stopping.max_tokens


def check_terms(ours: HandOffTerms | None, theirs: HandOffTerms | None) -> None:
    """Raise `Incompatible` unless both engines move KV alike: same kind, same version."""
    if ours != theirs:
        raise Incompatible(f"hand-off: expected {_told(ours)}, got {_told(theirs)}")


def _told(terms: HandOffTerms | None) -> str:
    return "one over a KV link" if terms is None else f"{terms.kind} {terms.engine_version}"


def check_hand_off(terms: HandOffTerms | None, job: DecodeJob) -> None:
    """See that the engine here, which moves KV by `terms`, can take `job`.

    Raises:
        Refused: says what was expected; never what the hand-off holds.
    """
    offer = job.hand_off
    try:
        check_terms(terms, None if offer is None else offer.terms)
    except Incompatible as err:
        raise Refused(RefusalReason.WRONG_MODEL, str(err)) from err
    if offer is None:
        return
    if len(offer.opaque) > MAX_OPAQUE_BYTES:
        text = f"expected a hand-off of at most {MAX_OPAQUE_BYTES} bytes, got {len(offer.opaque)}"
        raise Refused(RefusalReason.UNSUPPORTED, text)
    expected = offer.terms.first_token is FirstToken.PREFILL
    if bool(job.first_ids) is not expected:
        text = f"first token of {offer.terms.first_token}, got {len(job.first_ids)} from prefill"
        raise Refused(RefusalReason.UNSUPPORTED, text)


class TakeOver:
    """Answers reservations, and turns a decode job into verified blocks."""

    def __init__(  # noqa: PLR0913 - all that a hand-off ends in
        self,
        incoming: IncomingTransfers,
        admission: JobAdmission,
        spec: EngineSpec,
        *,
        parking: Parking,
        metrics: WorkerMetrics,
        now_s: Callable[[], float],
        held: HeldPrefixes,
    ) -> None:
        self._incoming = incoming
        self._held = held
        self.parking = parking
        self._metrics = metrics
        self._admission = admission
        self._fingerprint = spec.fingerprint
        self._layout = spec.layout
        self._terms = spec.hand_off
        self._now_s = now_s
        self._promised: dict[TransferId, tuple[RequestId, int]] = {}

    async def make_room(self, request: Reserve) -> None:
        """Have room ready where KV is to park, so that `reserve` need not wait for a disk."""
        if request.parking:
            blocks = self._parked_blocks(request)
            await self.parking.prepare(request.parking, blocks)

    def _parked_blocks(self, request: Reserve) -> int:
        return self._layout.blocks(context_tokens(request.generation))

    def reserve(self, request: Reserve) -> ReserveAnswer:
        """A seat, and transfer slots under a lease. The same request again: the same ticket.

        Of one that parks it is room to park instead of the seat.
        """
        generation = request.generation
        key = (generation.request_id, generation.attempt)
        try:
            check_fingerprint(self._fingerprint, request.fingerprint)
            check_terms(self._terms, request.hand_off)
        except Incompatible as err:
            return self._no(request, RefusalReason.WRONG_MODEL, str(err))
        tokens = whole_tokens(generation)
        if request.parking:
            admitted = self._admission.park(*key, tokens)
        else:
            admitted = self._admission.admit(*key, tokens, may_wait=False)
        if isinstance(admitted, NotAdmitted):
            return self._no(request, admitted.reason, admitted.detail)
        try:
            # Of a ticket that was claimed, or is over, comes no room: below it is refused.
            if request.parking and not (admitted.duplicate and not self._is_promised(request)):
                blocks = self._parked_blocks(request)
                self.parking.reserve(request.parking, request.transfer_id, blocks)
            ticket = self._incoming.reserve(
                request,
                tokens=context_tokens(generation),
                now_s=self._now_s(),
                held_blocks=0 if admitted.duplicate else self._held.blocks(request),
            )
        except Refused as err:
            self._give_up(request.transfer_id, key, seated=not admitted.duplicate)
            return self._no(request, RefusalReason(err.reason), str(err))
        except Incompatible as err:
            self._give_up(request.transfer_id, key, seated=not admitted.duplicate)
            return self._no(request, RefusalReason.WRONG_MODEL, str(err))
        self._promised[request.transfer_id] = key
        return ticket

    def _is_promised(self, request: Reserve) -> bool:
        return request.transfer_id in self._promised

    def _no(self, request: Reserve, reason: RefusalReason, detail: str) -> ReserveRefused:
        self._metrics.kv_refused(reason)
        self._incoming.note_refused(request, f"{reason}: {detail}", self._now_s())
        return ReserveRefused(transfer_id=request.transfer_id, reason=reason, detail=detail)

    def snapshot(self, worker: Incarnation, ask: KvAsk) -> KvSnapshot:
        """The transfers on their way here."""
        incoming, now_s = self._incoming, self._now_s()
        if ask.about:
            found = incoming.about(ask.about, now_s)
        else:
            found = incoming.transfers(now_s, ended=ask.ended, slots=ask.slots)
        return KvSnapshot(
            worker=worker,
            slots=incoming.slots_total,
            slots_used=incoming.slots_used,
            slots_quarantined=incoming.slots_quarantined,
            slot_bytes=incoming.slot_bytes,
            lease_ms=round(incoming.lease_s * 1000),
            transfers=tuple(found),
        )

    @property
    def slots_total(self) -> int:
        """All transfer slots."""
        return self._incoming.slots_total

    @property
    def slots_used(self) -> int:
        """Transfer slots that cannot be given to a new ticket."""
        return self._incoming.slots_used

    @property
    def slots_quarantined(self) -> int:
        """Of these, slots of ended tickets that somebody may still touch."""
        return self._incoming.slots_quarantined

    @property
    def obstacle(self) -> str:
        """Why no ticket could be given; empty if one could."""
        if self.slots_used < self.slots_total or not self.slots_total:
            return ""
        return (
            f"all {self.slots_total} KV transfer slots are in use "
            f"({self.slots_quarantined} in quarantine)"
        )

    def claim(self, job: DecodeJob) -> Sequence[IncomingBlock]:
        """The blocks of `job`, verified, as they came.

        Raises:
            Refused: it shows no ticket that counts here (`BadTicket` says why), or hands over what
                the engine here cannot take.
            Unverified: the blocks are not what was written; nothing may be decoded from them.
        """
        with spans.start_as_current_span(names.KV_VERIFY) as span:
            span.set_attribute(names.TRANSFER_ID, job.transfer_id)
            span.set_attribute(names.LINK, job.report.link)
            span.set_attribute(names.TRANSFER_BLOCKS, len(job.blocks))
            span.set_attribute(names.TRANSFER_BYTES, sum(block.n_bytes for block in job.blocks))
            try:
                check_hand_off(self._terms, job)
                blocks = self._incoming.claim(
                    job, tokens=context_tokens(job.generation), now_s=self._now_s()
                )
            except (Refused, Unverified) as err:
                reason = err.fault if isinstance(err, BadTicket) else err.reason
                span.set_attribute(names.KV_REFUSED, str(reason))
                self._metrics.kv_refused(reason)
                log.warning(
                    "kv_refused",
                    request_id=job.generation.request_id,
                    reason=reason,
                    error=str(err),
                )
                if not self._incoming.is_open(job.transfer_id):
                    self.forget(job.transfer_id)  # else its holder may still come
                raise
        if self._promised.pop(job.transfer_id, None) is None:
            self._incoming.release(job.transfer_id)
            text = f"the room of {job.transfer_id} was given back when it was asked for anew"
            raise Refused(RefusalReason.UNKNOWN_TICKET, text)
        return blocks

    def keeps(self, blocks: Sequence[IncomingBlock]) -> bool:
        """Whether the engine may keep what it imports of `blocks` as a cached prefix."""
        return self._held.on and not any(block.packing.codec in LOSSY for block in blocks)

    async def unpacked(self, blocks: Sequence[IncomingBlock]) -> list[KvBlock]:
        """What an engine imports: claimed blocks, opened and decoded off the event loop.

        Raises:
            Unverified: one is not what its ticket allows; nothing may be decoded from them.
        """
        if all(block.is_plain for block in blocks):
            return [KvBlock(p0=block.p0, p1=block.p1, data=block.data) for block in blocks]
        began_s = self._now_s()
        try:
            found = await asyncio.to_thread(lambda: [_unpacked(block) for block in blocks])
        except Unverified as err:
            self._metrics.kv_refused(err.reason)
            log.warning("kv_refused", reason=err.reason, error=str(err))
            raise
        self._metrics.unpacked(blocks[0].packing.codec, self._now_s() - began_s)
        return found

    def imported(self, transfer_id: TransferId) -> None:
        """The engine needs a claimed ticket's blocks no more."""
        self._incoming.release(transfer_id)
        self._held.let_go(transfer_id)

    def release(self, message: Release) -> Released:
        """The writer will not hand a ticket over."""
        if message.reason and self._incoming.is_open(message.transfer_id):
            log.warning(
                "kv_not_handed_over", transfer_id=message.transfer_id, error=message.reason[:300]
            )
        self._incoming.writer_stopped(message.transfer_id, message.reason, writes=message.writes)
        self.forget(message.transfer_id)
        return Released(transfer_id=message.transfer_id)

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Take a ticket that waits for its job back."""
        ticket = transfer_id(request_id, attempt)
        if ticket in self._promised:
            self._incoming.release(ticket, "cancelled by its scheduler")
            self.forget(ticket)

    def sweep(self) -> None:
        """Take overdue tickets back, and count what the links refused. On a timer of its own."""
        self.parking.advance()
        for ended in self._incoming.sweep(self._now_s()):
            log.warning("ticket_expired", transfer_id=ended)
            self.forget(ended)
        for reason, count in self._incoming.take_refusals().items():
            self._metrics.kv_refused(reason, count)

    def forget(self, transfer_id: TransferId) -> None:
        """A ticket has ended before its job: give its seat back."""
        key = self._promised.pop(transfer_id, None)
        if key is not None:
            self._held.let_go(transfer_id)
            self.parking.free(transfer_id)
            self._admission.unseat(*key)
            self.parking.advance()

    def _give_up(
        self, transfer_id: TransferId, key: tuple[RequestId, int], *, seated: bool
    ) -> None:
        self.forget(transfer_id)
        if seated:
            self._held.let_go(transfer_id)
            self.parking.free(transfer_id)
            self._admission.unseat(*key)
            self.parking.advance()


def _unpacked(block: IncomingBlock) -> KvBlock:
    return KvBlock(p0=block.p0, p1=block.p1, data=block.unpacked())

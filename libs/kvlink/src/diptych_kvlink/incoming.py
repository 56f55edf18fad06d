"""The reader's side: tickets out, verified blocks in. Fails closed.

Life of a ticket: `reserve` → (the writer fills its slots) → `claim` → (the engine imports) →
`release`. The states are `ledger`'s. Three voices can end a ticket, and each frees only what it can
answer for:

- the reader itself: `release` once it has imported a claimed ticket or given one up;
- the writer: its `Release` message is passed to `writer_stopped`;
- time: `sweep`, on a timer of its own, needs no traffic. It also looks whether the writer of an
  ended ticket has a slot open (the link knows) or is dead, so no lost message leaks a slot.

A ticket is sealed for whom it was given (`sealing`); only under it anything is taken over.

Everything here is called from one thread (the event loop's).
"""

from collections import deque

import msgspec

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.control import KvTransfer
from diptych_contracts.errors import Refused
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import DecodeJob, RefusalReason
from diptych_contracts.transfers import LinkEndpoint, Reserve, Ticket
from diptych_kvlink.claiming import Claims, IncomingBlock
from diptych_kvlink.engine_target import EngineTarget
from diptych_kvlink.held_slots import HeldSlots
from diptych_kvlink.ledger import State, Step, Transfer, TransferLedger
from diptych_kvlink.links import DEFAULT_LINKS, LinkSettings, open_targets
from diptych_kvlink.listing import held, over, since_end_ms, with_slots, with_steps
from diptych_kvlink.nixl_address import published
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.port import LinkTarget
from diptych_kvlink.reserving import Terms
from diptych_kvlink.sealing import TicketOffice, slots_digest
from diptych_kvlink.slots import SlotPool
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_receiving import Guard

_MOST_REASON_CHARS = 300
REFUSALS_KEPT = 512
"""Reservations refused that are remembered, for those who ask why."""
MOST_ABOUT = 256
"""Most transfers told of in one answer: 100 kB."""
REFUSED = "refused"


class IncomingTransfers:
    """The transfers into one worker, and the slots they go through.

    Args:
        layout: What the engine here imports. Where its blocks pass through no slots (`slot_bytes`
            is 0) the only link is `engine`: tickets name no slots, and nothing is written.
        slots: How many blocks can be on their way at once.
        lease_s: How long each open state of a ticket lasts; a repeated `Reserve` renews it.
        name: This worker's incarnation.
        links: Over which links; they share the slots. Their clock is that of every `now_s`.
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
        self._terms = Terms(layout, fingerprint, lease_s, links.codecs, links.seal, links.clock)
        self._office = TicketOffice(links.clock)
        self._tally = Tally()
        self._ledger = TransferLedger()
        guard = Guard(self._office, self._tally)
        if layout.slot_bytes:
            shape = PoolShape(slots=slots, slot_bytes=layout.slot_bytes)
            targets = open_targets(links, name=name, shape=shape, guard=guard)
        else:
            slots, targets = 0, (EngineTarget(),)
        self._held = HeldSlots(targets, SlotPool(slots), self._ledger)
        self._claims = Claims(self._terms, self._office, self._ledger, self._held)
        self._cooling: set[TransferId] = set()
        self._refused: deque[tuple[str, KvTransfer, Step]] = deque(maxlen=REFUSALS_KEPT)

    @property
    def endpoints(self) -> tuple[LinkEndpoint, ...]:
        """The links that can write to this worker, fastest first: what all may know of them."""
        return tuple(published(target.endpoint) for target in self._held.targets)

    @property
    def slots_total(self) -> int:
        """All transfer slots."""
        return self._held.pool.total

    @property
    def slots_used(self) -> int:
        """Slots that cannot be given to a new ticket, quarantined ones included."""
        return self._held.pool.used

    @property
    def slot_bytes(self) -> int:
        """Of one slot."""
        return self._terms.layout.slot_bytes

    @property
    def lease_s(self) -> float:
        """How long each open state of a ticket lasts at least."""
        return self._terms.lease_s

    @property
    def slots_quarantined(self) -> int:
        """Slots of ended tickets that somebody may still touch."""
        return self._held.pool.quarantined

    def reserve(
        self, request: Reserve, *, tokens: int, now_s: float, held_blocks: int = 0
    ) -> Ticket:
        """Leave to write the KV of `tokens` tokens. The same request again renews the lease.

        The same over another link moves the ticket there, by which its writer says that it does
        not use the first one. Of a new ticket the first `held_blocks`, never all, are here already
        and stay here until it ends: that is the caller's word.

        Raises:
            Refused: `no_room`; `unsupported` link, or certificate for it; `expired` if this
                transfer has ended already.
            Incompatible: layout or model differ; the message names the fields.
        """
        target = self._held.target(request.link)
        self._terms.check(request, tokens)
        self._terms.check_sealing(request, tls=bool(target.endpoint.certificate))
        transfer = self._ledger.get(request.transfer_id)
        if transfer is None or not transfer.is_open:
            opened = self._terms.opened(request, tokens, now_s=now_s, held_blocks=held_blocks)
            transfer = self._open(request, opened, target)
        elif not self._terms.is_repeat(transfer, request, tokens):
            raise Refused(RefusalReason.UNSUPPORTED, f"{request.transfer_id} is in use")
        elif not self._held.is_open_on(transfer, target):
            target.expect(request.prefill_worker, request.certificate, request.agent)
            self._held.move(transfer, target)
            self._terms.agree(transfer, request, tls=transfer.tls)
        granted_s = self._terms.granted_s(request)
        transfer.renew(now_s + granted_s)
        return self._ticket(transfer, request, lease_ms=int(granted_s * 1000))

    def claim(self, job: DecodeJob, *, tokens: int, now_s: float) -> tuple[IncomingBlock, ...]:
        """The blocks written under `job`'s ticket, each verified.

        They cover [0, `tokens`), but for the first ones that were here already.

        The ticket's slots are closed to the writer first. If anything does not fit, the ticket
        has failed and its slots wait until the writer has closed them.

        Raises:
            BadTicket: (`unknown_ticket`) `job` shows none, or one that is altered, over, used, or
                someone else's. Nothing changes: its holder may still come.
            Unverified: counts, lengths or checksums do not match; nothing may be decoded.
        """
        return self._claims.claim(job, tokens=tokens, now_s=now_s)

    def is_open(self, transfer_id: TransferId) -> bool:
        """Whether a ticket can still be claimed, or is being imported."""
        transfer = self._ledger.get(transfer_id)
        return transfer is not None and transfer.is_open

    def release(self, transfer_id: TransferId, reason: str = "given up by the reader") -> None:
        """This worker is done with a ticket: imported, or given up for `reason`. Idempotent.

        A ticket given up before its claim has failed; its slots wait until the writer has closed
        them.
        """
        transfer = self._ledger.get(transfer_id)
        if transfer is not None:
            if transfer.state is State.VERIFIED:
                transfer.end(State.RELEASED, "imported")
            transfer.end(State.FAILED, reason)
            self._held.reader_is_done(transfer)

    def writer_stopped(
        self, transfer_id: TransferId, reason: str = "", *, writes: bool = False
    ) -> None:
        """The writer said (`Release`) that it hands nothing over under this ticket. Idempotent.

        A claimed ticket is the reader's: the message, then only late, changes nothing.

        Args:
            transfer_id: The ticket's.
            reason: What failed there; empty: nothing did.
            writes: Whether something may still arrive: then its slots wait for the link's word.
        """
        transfer = self._ledger.get(transfer_id)
        if transfer is not None:
            transfer.writer_may_write = transfer.writer_may_write and writes
            if transfer.state is not State.VERIFIED and reason:
                transfer.end(State.FAILED, f"failed at its writer: {_told(reason)}")
            elif transfer.state is not State.VERIFIED:
                transfer.end(State.RELEASED, "released by the writer")
            self._held.settle()

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
        self._held.settle()
        return [transfer.transfer_id for transfer in ended]

    def sweep(self, now_s: float) -> list[TransferId]:
        """End what is overdue or whose writer is dead; gives the ids that ended.

        Also looks at everything in quarantine again. To be called a few times a second.
        """
        for transfer in self._ledger:
            # Ended before the last sweep: its gates are closed long enough to trust the marks.
            if transfer.transfer_id in self._cooling and self._held.is_idle(transfer):
                transfer.writer_may_write = False
        ended = [*self._ledger.expire(now_s), *self._bury_dead_writers()]
        self._held.settle()
        self._cooling = {t.transfer_id for t in self._ledger if not t.is_open}
        return [transfer.transfer_id for transfer in ended]

    def transfers(self, now_s: float, *, ended: int = 0, slots: bool = False) -> list[KvTransfer]:
        """Every transfer whose slots are not free yet, and the `ended` last ones that are over."""
        going = [self._held_now(transfer, now_s, slots=slots) for transfer in self._ledger]
        return [
            *going,
            *(over(transfer_id, how, now_s) for transfer_id, how in self._ledger.ended(ended)),
        ]

    def about(self, beginning: str, now_s: float) -> list[KvTransfer]:
        """What is known of transfers whose id begins so, each with its way; refusals too."""
        going = [
            with_steps(self._held_now(transfer, now_s, slots=True), transfer.steps, now_s)
            for transfer in self._ledger
            if transfer.transfer_id.startswith(beginning)
        ]
        ended = [
            with_steps(over(transfer_id, how, now_s), how.steps, now_s)
            for transfer_id, how in self._ledger.over_about(beginning, most=MOST_ABOUT)
        ]
        refused = [
            with_steps(_refused(told, step, now_s), (step,), now_s)
            for transfer_id, told, step in reversed(self._refused)
            if transfer_id.startswith(beginning)
        ]
        return [*going, *ended, *refused][:MOST_ABOUT]

    def note_refused(self, request: Reserve, reason: str, now_s: float) -> None:
        """Remember that a reservation got no ticket, for whoever asks about it."""
        told = KvTransfer(
            transfer_id=request.transfer_id,
            state=REFUSED,
            writer=request.prefill_worker,
            link=request.link,
            reason=reason,
        )
        self._refused.append((request.transfer_id, told, Step(REFUSED, reason, now_s)))

    def _held_now(self, transfer: Transfer, now_s: float, *, slots: bool) -> KvTransfer:
        told = held(transfer, now_s)
        return with_slots(told, self._held.refs(transfer)) if slots else told

    def take_refusals(self) -> dict[str, int]:
        """What the links refused since the last call, by `TicketFault` or `TurnedAway`."""
        return self._tally.take()

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken: a leaked slot, say."""
        self._ledger.check()
        self._held.check()

    def close(self) -> None:
        """Give the pool up. Views still in use stay valid until they are dropped."""
        self._held.shut()

    def _open(self, request: Reserve, transfer: Transfer, target: LinkTarget) -> Transfer:
        ended = self._ledger.how_ended(request.transfer_id)
        if ended is not None:
            raise Refused(RefusalReason.EXPIRED, f"{request.transfer_id} has ended: {ended}")
        target.expect(request.prefill_worker, request.certificate, request.agent)
        refs = self._held.pool.take(transfer.blocks)
        self._ledger.add(transfer)
        self._held.give(transfer, refs, target)
        self._terms.agree(transfer, request, tls=transfer.tls)
        return transfer

    def _ticket(self, transfer: Transfer, request: Reserve, *, lease_ms: int) -> Ticket:
        layout, refs = self._terms.layout, self._held.refs(transfer)
        transfer.slots_digest = slots_digest(transfer.link, layout, refs)
        seal = self._office.seal(
            request.generation,
            request.prefill_worker,
            slots=transfer.slots_digest,
            deadline_s=transfer.deadline_s,
        )
        return Ticket(
            transfer_id=transfer.transfer_id,
            attempt=request.generation.attempt,
            endpoint=self._held.endpoint(transfer),
            slots=refs,
            layout=layout,
            lease_ms=lease_ms,
            seal=seal,
            codec=transfer.codec,
            sealing_key=transfer.sealing_key,
            held_blocks=transfer.held_blocks,
        )

    def _bury_dead_writers(self) -> list[Transfer]:
        ended = []
        for transfer in self._ledger:
            if transfer.writer_may_write and self._held.has_dead_writer(transfer):
                transfer.writer_may_write = False
                if transfer.end(State.FAILED, f"writer {transfer.writer} died"):
                    ended.append(transfer)
        return ended


def _refused(told: KvTransfer, step: Step, now_s: float) -> KvTransfer:
    return msgspec.structs.replace(told, ended_ms=since_end_ms((step,), now_s))


def _told(reason: str) -> str:
    """What another process says, fit for a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in reason[:_MOST_REASON_CHARS])

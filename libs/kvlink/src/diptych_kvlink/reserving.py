"""What a reservation must satisfy, and the ticket that answers it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.codecs import RAW
from diptych_contracts.errors import Incompatible, Refused, Unverified
from diptych_contracts.jobs import Generation, RefusalReason
from diptych_contracts.transfers import Reserve
from diptych_kvlink.agreement import check_fingerprint, check_layout
from diptych_kvlink.block_seal import new_key
from diptych_kvlink.ledger import State, Transfer
from diptych_kvlink.verifying import Mismatch, context_salt, ticket_id


@dataclass(frozen=True, slots=True)
class Terms:
    """What a reader takes, and for how long it keeps room.

    Args:
        layout: Of KV.
        fingerprint: Of the model; None leaves that check to the caller.
        lease_s: Of each open state of a ticket.
        codecs: How blocks may be encoded.
        seal: Whether they are sealed where a link has no TLS.
        clock: Of every `now_s`.
    """

    layout: KvLayout
    fingerprint: Fingerprint | None
    lease_s: float
    codecs: tuple[str, ...] = (RAW,)
    seal: bool = False
    clock: Callable[[], float] = time.monotonic

    def check(self, request: Reserve, tokens: int) -> None:
        """Raise unless KV as `request` names it could be taken.

        Raises:
            Incompatible: layout, model or transfer id are others than expected.
            Refused: `expired`.
        """
        check_layout(self.layout, request.layout)
        if self.fingerprint is not None:
            check_fingerprint(self.fingerprint, request.fingerprint)
        expected = ticket_id(request.generation)
        if request.transfer_id != expected or tokens < 1:
            raise Incompatible(
                f"expected transfer {expected} of at least one token, "
                f"got {request.transfer_id} of {tokens}"
            )
        if request.generation.budget_ms <= 0:
            raise Refused(RefusalReason.EXPIRED, f"{expected} has no time left")

    def granted_s(self, request: Reserve) -> float:
        """How long its ticket lasts: as it asks, at least the lease, at most its budget.

        Exactly as it asks where prefill's engine frees KV that nobody fetches: a ticket that
        outlasted that would be for KV that is gone.
        """
        asked_s = request.lease_ms / 1000
        if request.hand_off is None or not request.hand_off.orphan_ms or not asked_s:
            asked_s = max(self.lease_s, asked_s)
        return min(asked_s, request.generation.budget_ms / 1000)

    def opened(self, request: Reserve, tokens: int, *, now_s: float, held_blocks: int) -> Transfer:
        """The transfer that begins with `request`; its first `held_blocks` are here already."""
        return Transfer(
            clock=self.clock,
            transfer_id=request.transfer_id,
            deadline_s=now_s + self.granted_s(request),
            writer=request.prefill_worker,
            certificate=request.certificate,
            tokens=tokens,
            held_blocks=held_blocks,
            blocks=(blocks := self.layout.blocks(tokens) - held_blocks),
            salt=self.salt(request.generation),
            n_bytes=blocks * self.layout.slot_bytes,
            opened_s=now_s,
        )

    def agree(self, transfer: Transfer, request: Reserve, *, tls: bool) -> None:
        """Settle how the blocks of `transfer` travel over the link it is open on.

        A key is for one link only, so that no block is ever sealed twice under one.
        """
        transfer.codec = request.codec if request.codec in self.codecs else RAW
        transfer.sealing_key = new_key() if self.seal and not tls else b""

    def check_sealing(self, request: Reserve, *, tls: bool) -> None:
        """Raise `Refused` (`unsupported`) if blocks must be sealed and its writer cannot."""
        if self.seal and not tls and not request.seals:
            raise Refused(
                RefusalReason.UNSUPPORTED,
                f"{request.prefill_worker} seals no blocks; over {request.link} they must be",
            )

    def is_repeat(self, transfer: Transfer, request: Reserve, tokens: int) -> bool:
        """Whether `request` asks for `transfer`, which is still to be written, once more."""
        return (
            transfer.state is State.RESERVED
            and transfer.writer == request.prefill_worker
            and transfer.certificate == request.certificate
            and transfer.tokens == tokens
            and transfer.salt == self.salt(request.generation)
        )

    def salt(self, generation: Generation) -> int:
        """Of its context (`verifying.context_salt`). Raises `Incompatible`."""
        return context_salt(generation, self.fingerprint.base if self.fingerprint else "")

    def claimed_salt(self, generation: Generation) -> int:
        """The same of a job: one without any is about another context. Raises `Unverified`."""
        try:
            return self.salt(generation)
        except Incompatible as err:
            raise Unverified(str(err), reason=Mismatch.CONTEXT) from err

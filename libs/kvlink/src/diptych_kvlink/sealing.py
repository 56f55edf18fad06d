"""Tickets that only the worker that gave them can make, and that it alone checks.

A seal binds a ticket to its transfer, request, attempt, tenant, writer, slots (with their
generations, link and layout) and end. Issuer and verifier are one process, so a secret of its own
and HMAC-SHA256 are enough: there is no key to hand out, to rotate or to steal elsewhere, and a
ticket of an earlier life of the worker is void. Its end is read on that process's monotonic clock.
"""

import hashlib
import hmac
import math
import secrets
import struct
from collections.abc import Callable, Sequence

import msgspec

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import Permanent, Refused
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import DecodeJob, Generation, RefusalReason
from diptych_contracts.tickets import TicketFault, TicketSeal
from diptych_contracts.transfers import SlotRef
from diptych_contracts.wire import decode, encode
from diptych_kvlink.verifying import ticket_id

_PURPOSE = b"diptych kv ticket 1\0"
_SECRET_BYTES = 32


class BadTicket(Refused):
    """A ticket that does not count here (`unknown_ticket`); `fault` says what is wrong with it."""

    def __init__(self, fault: TicketFault, detail: str) -> None:
        super().__init__(RefusalReason.UNKNOWN_TICKET, f"{detail} ({fault})")
        self.fault = fault


def slots_digest(link: str, layout: KvLayout, refs: Sequence[SlotRef]) -> bytes:
    """32 bytes that only these slots, in these generations, over this link have."""
    numbers = [number for ref in refs for number in (ref.slot, ref.generation)]
    known = hashlib.sha256(encode(layout))
    known.update(link.encode() + struct.pack(f"<{1 + len(numbers)}Q", len(refs), *numbers))
    return known.digest()


class TicketOffice:
    """Seals tickets, and checks the seals. Safe to use from several threads.

    Args:
        clock: Monotonic seconds: by it tickets end.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(_SECRET_BYTES)

    def seal(
        self, generation: Generation, writer: Incarnation, *, slots: bytes, deadline_s: float
    ) -> TicketSeal:
        """The seal of the ticket of `generation`, for `writer`, until `deadline_s`."""
        seal = TicketSeal(
            transfer_id=ticket_id(generation),
            request_id=generation.request_id,
            attempt=generation.attempt,
            tenant=generation.tenant,
            writer=writer,
            slots=slots,
            expires_ms=math.ceil(deadline_s * 1000),
        )
        return msgspec.structs.replace(seal, mac=self._mac(seal))

    def check_job(self, job: DecodeJob) -> TicketSeal:
        """The seal of the ticket `job` is handed over under: it is this very job's.

        Raises:
            BadTicket: there is none, or it is altered or somebody else's.
        """
        seal, generation = job.seal, job.generation
        expected = ticket_id(generation)
        if seal is None:
            raise BadTicket(TicketFault.MISSING, f"{expected} is handed over without a ticket")
        self._check_mac(seal)
        if (seal.request_id, seal.attempt) != (generation.request_id, generation.attempt):
            given = f"{seal.request_id}.{seal.attempt}"
            raise BadTicket(TicketFault.REQUEST, f"the ticket of {given} is not {expected}'s")
        if job.transfer_id != expected:
            detail = f"{job.transfer_id} is not the ticket of {expected}"
            raise BadTicket(TicketFault.REQUEST, detail)
        if seal.tenant != generation.tenant:
            raise BadTicket(TicketFault.TENANT, f"{expected} was given for another tenant")
        if seal.writer != job.prefill_worker:
            detail = f"{expected} was given to {seal.writer}, not to {job.prefill_worker}"
            raise BadTicket(TicketFault.WRITER, detail)
        return seal

    def check_current(self, seal: TicketSeal, slots: bytes, *, now_s: float) -> None:
        """Raise `BadTicket` unless a sealed ticket is for `slots` and has time left."""
        if seal.slots != slots:
            detail = f"{seal.transfer_id} has other slots, or another link, by now"
            raise BadTicket(TicketFault.SLOTS, detail)
        _check_time(seal, now_s)

    def check_write(self, shown: bytes, writer: Incarnation) -> TransferId:
        """The transfer that `writer` may write for, by the ticket it shows.

        Raises:
            BadTicket: there is none, or it is altered, over, or somebody else's.
        """
        if not shown:
            raise BadTicket(TicketFault.MISSING, f"{writer} writes without a ticket")
        try:
            seal: TicketSeal = decode(shown, TicketSeal)
        except Permanent as err:
            raise BadTicket(TicketFault.ALTERED, f"{writer} shows no ticket: {err}") from err
        self._check_mac(seal)
        if seal.writer != writer:
            detail = f"{writer} shows the ticket {seal.transfer_id} of {seal.writer}"
            raise BadTicket(TicketFault.WRITER, detail)
        _check_time(seal, self._clock())
        return seal.transfer_id

    def _check_mac(self, seal: TicketSeal) -> None:
        if not hmac.compare_digest(seal.mac, self._mac(seal)):
            detail = f"{seal.transfer_id} was not sealed like this by this worker"
            raise BadTicket(TicketFault.ALTERED, detail)

    def _mac(self, seal: TicketSeal) -> bytes:
        bound = encode(msgspec.structs.replace(seal, mac=b""))
        return hmac.digest(self._secret, _PURPOSE + bound, "sha256")


def _check_time(seal: TicketSeal, now_s: float) -> None:
    late_ms = now_s * 1000 - seal.expires_ms
    if late_ms >= 0:
        raise BadTicket(TicketFault.EXPIRED, f"{seal.transfer_id} ended {late_ms:.0f} ms ago")

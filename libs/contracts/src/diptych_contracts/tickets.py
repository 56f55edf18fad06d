"""What a KV ticket is bound to, and what can be wrong with one."""

from enum import StrEnum

from diptych_contracts.ids import Incarnation, RequestId, TransferId
from diptych_contracts.wire import Message


class TicketSeal(Message, frozen=True, kw_only=True, tag="ticket_seal.1"):
    """What one ticket allows, sealed by the worker that gave it.

    Who gives a ticket is who checks it, so a secret of that process seals it (HMAC-SHA256) and
    nobody else needs a key. It is shown with every write over a network and with the hand-over.
    """

    transfer_id: TransferId
    request_id: RequestId
    attempt: int
    tenant: str
    writer: Incarnation
    slots: bytes
    """SHA-256 of link, layout, and each slot with its generation, in order."""
    expires_ms: int
    """On its giver's monotonic clock: nobody else can read it."""
    mac: bytes = b""


class TicketFault(StrEnum):
    """Why a ticket does not count."""

    MISSING = "ticket_missing"
    ALTERED = "ticket_altered"
    """Not what this worker sealed, in this life."""
    EXPIRED = "ticket_expired"
    USED = "ticket_used"
    """Claimed, ended or given up before."""
    TENANT = "ticket_tenant"
    """Given for another tenant."""
    REQUEST = "ticket_request"
    """Given for another request or attempt."""
    WRITER = "ticket_writer"
    """Given to another worker."""
    SLOTS = "ticket_slots"
    """For other slots, or another link or layout, than the transfer has."""

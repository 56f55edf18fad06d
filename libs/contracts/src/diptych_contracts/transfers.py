"""The hand-off's control messages. KV bytes never travel here: they cross a KV link."""

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.codecs import RAW
from diptych_contracts.handoffs import HandOffTerms
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import Generation, RefusalReason
from diptych_contracts.tickets import TicketSeal
from diptych_contracts.wire import Message

MAX_TRANSFER_BLOCKS = 32_768
"""A ticket names a slot, a job a digest for each block, in 60 bytes, 110 where the block is sealed
and encoded: 3.6 MB of a message's 3.9."""


class LinkEndpoint(Message, frozen=True, kw_only=True, tag="link_endpoint.1"):
    """Where a worker's transfer slots can be written."""

    kind: str
    """`shm`, `nixl` or `tcp`; `engine` in a ticket without slots."""
    host: str
    """The host it reaches no further than (`WorkerRegistration.host`); empty: any."""
    address: str
    """What the link's writer needs to find it: only the link reads it."""
    slots: int
    slot_bytes: int
    certificate: bytes = b""
    """Whom its writer must find there (X.509, DER), and nobody else; empty: no TLS."""


class Reserve(Message, frozen=True, kw_only=True, tag="reserve.1"):
    """A prefill worker asks for room: engine cells, a sequence, and transfer slots."""

    transfer_id: TransferId
    generation: Generation
    prefill_worker: Incarnation
    link: str
    layout: KvLayout
    fingerprint: Fingerprint
    lease_ms: int = 0
    """How long the writer may take; the reader's own lease, if that is longer."""
    certificate: bytes = b""
    """What the writer will show where the link speaks TLS (X.509, DER)."""
    hand_off: HandOffTerms | None = None
    """Where the engines move KV themselves: how. The ticket then names no slots."""
    agent: bytes = b""
    """Its NIXL agent's name and metadata, for links of that kind: how it can be asked."""
    codec: str = RAW
    """How the writer would encode its blocks; the ticket says whether it may."""
    seals: bool = False
    """Whether the writer can seal its blocks under a ticket's key."""
    leaves_out: bool = False
    """Whether the writer can leave out the first blocks, where the reader has them."""
    parking: str = ""
    """Where the KV may wait for engine cells and a sequence: `host` or `disk`. Then room is kept
    there, and none in the engine. Empty: nowhere; the engine keeps room from now on."""


class SlotRef(Message, frozen=True, kw_only=True, tag="slot_ref.1"):
    """One slot; a write under another generation is refused."""

    slot: int
    generation: int


class Ticket(Message, frozen=True, kw_only=True, tag="ticket.1"):
    """Leave to write `slots`, block `held_blocks` + i into slot i, until the lease ends."""

    transfer_id: TransferId
    attempt: int
    endpoint: LinkEndpoint
    slots: tuple[SlotRef, ...]
    layout: KvLayout
    lease_ms: int
    seal: TicketSeal | None = None
    """To be shown with what is written, and with the job."""
    codec: str = RAW
    """How its blocks are encoded: as was asked, or not at all."""
    sealing_key: bytes = b""
    """AES-256 key of this transfer alone; empty: its blocks are not sealed."""
    held_blocks: int = 0
    """The first blocks, which the reader has and keeps as long as the ticket: no slots for them."""


class ReserveRefused(Message, frozen=True, kw_only=True, tag="reserve_refused.1"):
    """No ticket."""

    transfer_id: TransferId
    reason: RefusalReason
    detail: str = ""


ReserveAnswer = Ticket | ReserveRefused


class Release(Message, frozen=True, kw_only=True, tag="release.1"):
    """The writer will not hand a ticket over; unless it `writes`, nothing is written any more."""

    transfer_id: TransferId
    reason: str = ""
    """What failed at the writer; empty: nothing did, there was nothing to hand over."""
    writes: bool = False
    """Something of it may still arrive: its slots wait until the link says that it cannot."""


class Released(Message, frozen=True, kw_only=True, tag="released.1"):
    """The ticket is gone."""

    transfer_id: TransferId

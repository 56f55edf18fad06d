"""Who is there, and how they are."""

from enum import StrEnum

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.codecs import RAW
from diptych_contracts.handoffs import HandOffTerms
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import PriorityClass
from diptych_contracts.transfers import LinkEndpoint
from diptych_contracts.wire import Message


class Role(StrEnum):
    """What a worker is for. Either can run `local` requests."""

    PREFILL = "prefill"
    DECODE = "decode"


class Beat(Message, frozen=True, kw_only=True, tag="beat.1"):
    """A sign of life, every 100 ms from a thread of its own."""

    member: Incarnation
    service: str
    count: int
    pid: int = 0
    """On its host: a supervisor knows its own children by it."""
    ready: bool = False
    """Whether the process serves; a supervisor waits for it."""
    detail: str = ""
    """Why not, if not."""
    patience_ms: int = 0
    """How much longer than usual the next beat may take: something is done that lets no thread of
    the process run."""
    leaving: bool = False
    """Whether it is the last one: the process ends as it was asked to."""


class ParkingRoom(Message, frozen=True, kw_only=True, tag="parking_room.1"):
    """Where KV handed to a worker can wait until its engine has room."""

    kind: str
    """`host` (memory) or `disk`."""
    total_bytes: int
    """0: it is there, but out of order for now."""
    used_bytes: int = 0
    bytes_per_s: float = 0.0
    """Measured, the slower way of the two; 0: not yet."""


class WorkerRegistration(Message, frozen=True, kw_only=True, tag="worker_registration.1"):
    """What a worker offers: bucket `workers`, key = incarnation."""

    worker: Incarnation
    role: Role
    engine: str
    """Adapter and build, e.g. `llamacpp-b11549`."""
    model: str
    fingerprint: Fingerprint
    layout: KvLayout
    endpoints: tuple[LinkEndpoint, ...]
    """KV links that can write *to* this worker, fastest first."""
    max_sequences: int
    kv_tokens: int
    """KV cells in all."""
    context_tokens: int
    host: str = ""
    """Its machine and memory namespace: workers that have it in common can share memory."""
    hand_off: HandOffTerms | None = None
    """How its engine moves KV itself; None: over `endpoints`."""
    codecs: tuple[str, ...] = (RAW,)
    """How blocks written to it may be encoded."""
    kv_reuse: bool = False
    """Whether blocks that it has cached need not be handed over to it."""
    cap_min_w: float = 0.0
    """The lowest power cap its device takes."""
    cap_default_w: float = 0.0
    """The cap it has when nobody governs it, also the highest; 0: it cannot be capped."""
    parking: tuple[ParkingRoom, ...] = ()
    """Where KV written to it can wait for a seat."""


class WorkerLoad(Message, frozen=True, kw_only=True, tag="worker_load.1"):
    """A worker's telemetry: every 100 ms, and on change."""

    worker: Incarnation
    draining: bool = False
    running: int = 0
    """Sequences in the engine."""
    waiting: int = 0
    """Jobs accepted but not started."""
    waiting_tokens: int = 0
    """Prompt tokens still to be prefilled."""
    kv_tokens_used: int = 0
    """KV cells held or promised."""
    embedding_tokens: int = 0
    """Tokens of texts that wait for their vectors."""
    transfer_slots_used: int = 0
    parked: int = 0
    """Of those that wait, whose KV waits in `parking`."""
    parking: tuple[ParkingRoom, ...] = ()
    seat_gap_s: float = 0.0
    """Mean time between seats that fell free while somebody parked here; 0: not known."""
    kv_bytes_per_s: float = 0.0
    """What its hand-offs move at, measured; 0: not known."""
    power_w: float = 0.0
    cap_w: float = 0.0
    energy_j: float = 0.0
    """Since the worker started."""
    energy_source: str = "sim"


class ClassQueue(Message, frozen=True, kw_only=True, tag="class_queue.1"):
    """One priority class at one scheduler."""

    priority_class: PriorityClass
    waiting: int = 0
    """Requests without a first token, wherever they are."""
    gap_s: float = 0.0
    """Mean time between first tokens of the class while somebody waited for one; 0: not known."""


class QueueLoad(Message, frozen=True, kw_only=True, tag="queue_load.1"):
    """A scheduler's queue: every 250 ms. Gateways refuse by it what would wait too long."""

    scheduler: Incarnation
    queued: int = 0
    """Requests without workers."""
    max_queued: int = 0
    """At so many it takes no more."""
    storage_full: bool = False
    """The bucket of records takes none."""
    classes: tuple[ClassQueue, ...] = ()

"""Every stream, bucket and consumer, declared once with its limits.

The numbers and their reasons: `docs/wire.md`. A bus adapter creates what is missing and leaves the
rest alone.
"""

from dataclasses import dataclass
from enum import StrEnum

from diptych_contracts import subjects

MINUTE_S = 60.0
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S

TOTAL_DEADLINE_S = 1 * HOUR_S
RESUME_WINDOW_S = 15 * MINUTE_S

MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
"""The server's limit for one message, headers included."""
GATEWAY_HEADER = "Diptych-Gateway"
"""Of a stored request: whom to tell, even if it cannot be read."""
SECRET_HEADER = "Diptych-Secret"
"""Of a stored request: its secret in hex. If it cannot be read, its gateway must be told with a
voice all the same, or it would not believe it."""
MAX_MESSAGE_BYTES = 3_900_000
"""What `bus` accepts: beyond the server's limit the server closes the connection."""


class Discard(StrEnum):
    """What a full stream drops."""

    OLD = "old"
    NEW = "new"


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream of stored messages, kept until a limit is reached."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int
    discard: Discard
    dedupe_s: float
    republish: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A key-value bucket."""

    name: str
    history: int = 1
    max_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ObjectBucketSpec:
    """A bucket of large values."""

    name: str
    max_bytes: int = 1024**3
    max_age_s: float = 0.0
    """What nobody deleted goes after this; 0: never."""


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer shared by the replicas of a service."""

    stream: str
    name: str
    ack_wait_s: float
    max_deliver: int
    max_ack_pending: int
    batch: int


REQUESTS = StreamSpec(
    name="REQUESTS",
    subjects=("request.*.*",),
    max_age_s=TOTAL_DEADLINE_S + RESUME_WINDOW_S,
    max_bytes=4 * 1024**3,
    discard=Discard.NEW,
    dedupe_s=10 * MINUTE_S,
)
TOKENS = StreamSpec(
    name="TOKENS",
    subjects=("token.*",),
    max_age_s=TOTAL_DEADLINE_S + RESUME_WINDOW_S,
    max_bytes=8 * 1024**3,
    discard=Discard.OLD,
    dedupe_s=MINUTE_S,
    republish=("token.*", "live.{{wildcard(1)}}"),
)
EVENTS = StreamSpec(
    name="EVENTS",
    subjects=("event.>",),
    max_age_s=DAY_S,
    max_bytes=1024**3,
    discard=Discard.OLD,
    dedupe_s=2 * MINUTE_S,
)
DEAD = StreamSpec(
    name="DEAD",
    subjects=("dead.>",),
    max_age_s=7 * DAY_S,
    max_bytes=256 * 1024**2,
    discard=Discard.OLD,
    dedupe_s=10 * MINUTE_S,
)
AUDIT = StreamSpec(
    name="AUDIT",
    subjects=("audit.>",),
    max_age_s=400 * DAY_S,
    max_bytes=64 * 1024**2,
    discard=Discard.OLD,
    dedupe_s=2 * MINUTE_S,
)
"""Who did what (`contracts.audit`); a few hundred bytes an action, so it holds 100,000 of them."""

SCHEDULERS = ConsumerSpec(
    stream=REQUESTS.name,
    name="sched",
    ack_wait_s=2.0,
    max_deliver=5,
    max_ack_pending=1024,
    batch=8,
)

UNDELIVERED = StreamSpec(
    name="UNDELIVERED",
    subjects=(subjects.undelivered(SCHEDULERS.stream, SCHEDULERS.name),),
    max_age_s=REQUESTS.max_age_s,
    max_bytes=16 * 1024**2,
    discard=Discard.OLD,
    dedupe_s=MINUTE_S,
)
"""The server says once, to whoever listens, that it gives a message up: kept, nobody misses it."""
UNDELIVERED_SCHEDULERS = ConsumerSpec(
    stream=UNDELIVERED.name,
    name="sched",
    ack_wait_s=2.0,
    max_deliver=1_000_000,
    max_ack_pending=1024,
    batch=8,
)

STREAMS = (REQUESTS, TOKENS, EVENTS, DEAD, AUDIT, UNDELIVERED)

REQUEST_RECORDS = BucketSpec(name="requests", max_bytes=1024**3)
LEASES = BucketSpec(name="leases")
WORKERS = BucketSpec(name="workers")
CONFIG = BucketSpec(name="config", history=8)
RESPONSES = BucketSpec(name="responses", max_bytes=1024**3)
IDEMPOTENCY = BucketSpec(name="idempotency", max_bytes=512 * 1024 * 1024)
"""What idempotency keys stand for (`contracts.idempotency`)."""
FILES = BucketSpec(name="files", max_bytes=64 * 1024 * 1024)
BATCHES = BucketSpec(name="batches", max_bytes=64 * 1024 * 1024)
BATCH_RESULTS = BucketSpec(name="batch-results", max_bytes=1024**3)
"""What each line of a running batch came to, until its files are written."""
KEYS = BucketSpec(name="keys", history=8, max_bytes=64 * 1024 * 1024)
"""API keys, hashed, and tenants (`contracts.keys`); its history is part of the audit."""
ALLOWANCES = BucketSpec(name="allowances", max_bytes=64 * 1024 * 1024)
"""What is left of limits that gateways share (`contracts.allowances`)."""
USAGE = BucketSpec(name="usage")
"""What each tenant used, per day (`contracts.usage`)."""
BUCKETS = (
    REQUEST_RECORDS,
    LEASES,
    WORKERS,
    CONFIG,
    RESPONSES,
    IDEMPOTENCY,
    FILES,
    BATCHES,
    BATCH_RESULTS,
    KEYS,
    ALLOWANCES,
    USAGE,
)

MODELS = "models"
"""The object bucket that holds model cards."""
PROMPTS = "prompts"
"""The object bucket of long prompts, by request id (`contracts.prompts`)."""
DEAD_PROMPTS = "dead-prompts"
"""The object bucket of long prompts of dead requests, by request id."""
RESPONSE_PARTS = "response-parts"
"""The object bucket of what is too large in a stored response."""

FILE_PARTS = "file-parts"
"""The object bucket of files' contents, and of long results of batches."""
KV_BLOCKS_BYTES = 4 * 1024**3
KV_BLOCKS = "kv-blocks"
"""The object bucket of KV blocks, where the bus is one of the workers' tiers; empty else."""
FILE_TTL_S = 30 * DAY_S
BATCH_RESULT_TTL_S = 2 * DAY_S
IDEMPOTENCY_TTL_S = DAY_S

RUNNING_RESPONSE_TTL_S = TOKENS.max_age_s
"""As long as its tokens can be read in the journal."""
ENDED_RESPONSE_TTL_S = DAY_S
MAX_RESPONSE_BYTES = 256 * 1024
"""Of a stored response in its bucket; a larger input, or answer, is an object of its own."""

OBJECT_BUCKETS = (
    ObjectBucketSpec(MODELS),
    ObjectBucketSpec(PROMPTS, max_bytes=2 * 1024**3, max_age_s=REQUESTS.max_age_s),
    ObjectBucketSpec(DEAD_PROMPTS, max_bytes=DEAD.max_bytes, max_age_s=DEAD.max_age_s),
    ObjectBucketSpec(
        RESPONSE_PARTS,
        max_bytes=4 * 1024**3,
        max_age_s=RUNNING_RESPONSE_TTL_S + ENDED_RESPONSE_TTL_S,
    ),
    ObjectBucketSpec(FILE_PARTS, max_bytes=4 * 1024**3, max_age_s=FILE_TTL_S),
    ObjectBucketSpec(KV_BLOCKS, max_bytes=KV_BLOCKS_BYTES, max_age_s=DAY_S),
)

ALLOWANCE_TTL_S = 2 * MINUTE_S
"""A limit that nobody used for a minute is whole again: then its record says nothing."""
USAGE_TTL_S = 400 * DAY_S

LEASE_TTL_S = 10.0
WORKER_TTL_S = 30.0

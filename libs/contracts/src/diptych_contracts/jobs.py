"""Work for one worker, and its typed answers. Workers are idempotent on (request, attempt)."""

from enum import StrEnum

from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.ids import Incarnation, RequestId, TransferId
from diptych_contracts.journal import Chances, Report
from diptych_contracts.prompts import PromptRef
from diptych_contracts.requests import KvPath
from diptych_contracts.sampling import Sampling, Stopping
from diptych_contracts.tickets import TicketFault, TicketSeal
from diptych_contracts.wire import Message


class Generation(Message, frozen=True, kw_only=True, tag="generation.1"):
    """What to generate: the part every job shares."""

    request_id: RequestId
    attempt: int
    gateway: Incarnation
    model: str
    tenant: str
    prompt_ids: tuple[int, ...]
    """Empty where `prompt` says where they are."""
    prefix_ids: tuple[int, ...] = ()
    """Answer tokens already delivered by earlier attempts: they are context, not work."""
    sampling: Sampling
    stopping: Stopping
    budget_ms: int
    """Time left; made a monotonic deadline on arrival, since clocks differ."""
    prompt: PromptRef | None = None
    voice: bytes = b""
    """What the attempt's workers say in the journal they say with it (`policy.voices`)."""

    @property
    def prompt_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.prompt_ids) if self.prompt is None else self.prompt.tokens


class PrefillJob(Message, frozen=True, kw_only=True, tag="prefill_job.1"):
    """Prefill here, sample one token, hand over to `decode_worker`."""

    generation: Generation
    decode_worker: Incarnation
    link: str
    next_link: str | None = None
    """The link to take if `link` cannot be opened."""
    last_link: str | None = None
    """The link to take if neither of the two can be opened."""
    first_token_ms: int = 0
    """How long it may wait and compute: its ticket lasts that long at least; 0: not said."""
    transfer_ms: int = 0
    """How long the hand-off may take, from the end of prefill; 0: the worker's own setting."""
    path: KvPath | None = None
    """How its KV gets to the decode worker; None: straight."""


class BlockDigest(Message, frozen=True, kw_only=True, tag="block_digest.1"):
    """One written block: `index` within the transfer."""

    index: int
    n_bytes: int
    checksum: int
    """xxh3-64 of the block's bytes."""
    raw_bytes: int = 0
    """What they become when decoded; 0: they are not encoded."""
    seal: bytes = b""
    """Nonce and tag, where the block is sealed (AES-256-GCM)."""


class DecodeJob(Message, frozen=True, kw_only=True, tag="decode_job.1"):
    """Go on from KV that was written under a ticket."""

    generation: Generation
    prefill_worker: Incarnation
    transfer_id: TransferId
    first_ids: tuple[int, ...]
    """Tokens the prefill worker sampled after `prefix_ids`; their KV is not in the blocks."""
    first_logprobs: tuple[Chances, ...] = ()
    """One per token of `first_ids`, where the request asked for them."""
    blocks: tuple[BlockDigest, ...]
    report: Report
    """What the prefill phase took."""
    seal: TicketSeal | None = None
    """Of the ticket it was written under; a job without one is refused."""
    hand_off: EngineHandOff | None = None
    """Where the engines move KV themselves; then there are no `blocks`."""


class GenerateJob(Message, frozen=True, kw_only=True, tag="generate_job.1"):
    """Both phases here (`local`)."""

    generation: Generation


Job = PrefillJob | DecodeJob | GenerateJob


class RefusalReason(StrEnum):
    """Why a worker says no."""

    NO_ROOM = "no_room"
    DRAINING = "draining"
    CANCELLED = "cancelled"
    UNKNOWN_TICKET = "unknown_ticket"
    UNVERIFIED_KV = "unverified_kv"
    WRONG_MODEL = "wrong_model"
    EXPIRED = "expired"
    UNSUPPORTED = "unsupported"


class JobAccepted(Message, frozen=True, kw_only=True, tag="job_accepted.1"):
    """The worker answers for this attempt from now on."""

    request_id: RequestId
    attempt: int
    duplicate: bool = False


class JobRefused(Message, frozen=True, kw_only=True, tag="job_refused.1"):
    """The worker will not run this attempt."""

    request_id: RequestId
    attempt: int
    reason: RefusalReason
    detail: str = ""
    fault: TicketFault | None = None
    """What is wrong with its ticket (`unknown_ticket`)."""


JobAnswer = JobAccepted | JobRefused


class Cancel(Message, frozen=True, kw_only=True, tag="cancel.1"):
    """Stop every attempt of a request up to `attempt`, and free what it holds."""

    request_id: RequestId
    attempt: int


class CancelDone(Message, frozen=True, kw_only=True, tag="cancel_done.1"):
    """Nothing of it runs here any more (or ever did)."""

    request_id: RequestId
    attempt: int

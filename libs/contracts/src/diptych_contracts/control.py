"""Questions and orders to one running process: `control.<member>`, request and typed answer."""

from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.tiers import TierUsage
from diptych_contracts.wire import Message


class Scale(Message, frozen=True, kw_only=True, tag="scale.1"):
    """To a stack's supervisor: from now on `count` processes of `service`.

    Answered once as many serve and the others have drained and left. The same again is answered
    alike; a later order for the same service answers for the earlier one too.
    """

    service: str
    count: int


class ScaleDone(Message, frozen=True, kw_only=True, tag="scale_done.1"):
    """So it is."""

    service: str
    running: tuple[str, ...] = ()
    """The names of the processes that serve."""
    given_up: int = 0
    """How many were started and could never serve; their reason stands in the stack's log."""


class ScaleRefused(Message, frozen=True, kw_only=True, tag="scale_refused.1"):
    """It cannot be."""

    service: str
    reason: str


ScaleAnswer = ScaleDone | ScaleRefused


class KvAsk(Message, frozen=True, kw_only=True, tag="kv_ask.1"):
    """To a worker: which transfers are on their way to you, and from you?"""

    ended: int = 0
    """How many of those that are over to tell of too, the newest first."""
    about: str = ""
    """Only of those whose id begins so; then of ended ones too, and each with its steps."""
    slots: bool = False
    """Whether to name the slots each of them holds."""


class KvStep(Message, frozen=True, kw_only=True, tag="kv_step.1"):
    """A transfer entered a state."""

    state: str
    ago_ms: float
    """Before the answer that tells of it."""
    reason: str = ""


class KvTransfer(Message, frozen=True, kw_only=True, tag="kv_transfer.1"):
    """One transfer as one side of it sees it."""

    transfer_id: TransferId
    state: str
    """`kvlink.ledger.State`; `asked` and `refused` where there is no ticket."""
    writer: str = ""
    link: str = ""
    tls: bool = False
    """Whether its bytes cross encrypted, between two processes that know each other."""
    sealed: bool = False
    """Whether each block is sealed with a key of its transfer's own."""
    codec: str = ""
    """How its blocks are encoded; empty: not known any more."""
    age_ms: int = 0
    """Since its ticket was given."""
    left_ms: int = 0
    """Until the deadline of its state."""
    n_bytes: int = 0
    """Verified bytes; before that, the room it was given."""
    reason: str = ""
    """Why it ended."""
    reader: str = ""
    """Whose slots it goes into."""
    steps: tuple[KvStep, ...] = ()
    """Its way, the first step first; only where one was asked about."""
    ended_ms: int = 0
    """Since its end, at least 1; 0: it is open."""
    in_quarantine: bool = False
    """Ended, and somebody may still touch its slots (at its writer: it still has buffers open)."""
    slots: tuple[int, ...] = ()
    """The reader's slots it holds, block by block, where they were asked for."""
    generations: tuple[int, ...] = ()
    """Of these slots."""
    raw_bytes: int = 0
    """At its writer: KV before it was encoded."""
    moving_ms: float = 0.0
    """At its writer: time spent on moving bytes."""
    overlap_frac: float = 0.0
    """Share of it while the engine computed."""
    remainder_ms: float = 0.0
    """From the end of compute; at its writer to the peer's answer."""
    blocks: int = 0
    """Blocks it is for."""
    held_blocks: int = 0
    """The first blocks, which its reader had already: they are not among `blocks`."""


class KvSnapshot(Message, frozen=True, kw_only=True, tag="kv_snapshot.1"):
    """The transfers of one worker that hold something, and ended ones if asked for."""

    worker: Incarnation
    slots: int = 0
    slots_used: int = 0
    transfers: tuple[KvTransfer, ...] = ()
    """Into it."""
    outgoing: tuple[KvTransfer, ...] = ()
    """Out of it."""
    slots_quarantined: int = 0
    slot_bytes: int = 0
    prefix_blocks: int = 0
    """Blocks of KV that its engine keeps for prompts that begin alike."""
    lease_ms: int = 0
    """How long a state of a transfer into it lasts at least."""
    unix_ms: int = 0
    """Its wall clock as it answers."""


class ForgetTenant(Message, frozen=True, kw_only=True, tag="forget_tenant.1"):
    """An order to a worker: keep no KV and no prompt of this tenant beyond what runs."""

    tenant: str


class TenantForgotten(Message, frozen=True, kw_only=True, tag="tenant_forgotten.1"):
    """So it is."""

    worker: Incarnation
    sequences: int = 0
    """Cached prefixes that were dropped."""
    tier_entries: int = 0
    """KV blocks that were removed from its tiers, as far as these say."""
    tiers_away: tuple[str, ...] = ()
    """Tiers that were out of reach: they may hold KV of the tenant, and are tried again."""


class TenantKept(Message, frozen=True, kw_only=True, tag="tenant_kept.1"):
    """The worker does not obey."""

    worker: Incarnation
    reason: str


ForgetAnswer = TenantForgotten | TenantKept


class TiersAsk(Message, frozen=True, kw_only=True, tag="tiers_ask.1"):
    """To a worker: how are your KV tiers?"""

    tier: str = ""
    """Only the one of this name; empty: all."""


class TiersSnapshot(Message, frozen=True, kw_only=True, tag="tiers_snapshot.1"):
    """The tiers of one worker. Counts are since its start."""

    worker: Incarnation
    tiers: tuple[TierUsage, ...] = ()
    """The fastest first; none: it keeps KV in its engine only."""
    restored: int = 0
    """Prompts that began with KV out of a tier."""
    restored_tokens: int = 0
    """Tokens whose KV was read instead of computed."""
    late: int = 0
    """Reads given up because computing would have taken no longer."""
    dropped: int = 0
    """Blocks that were to be written and found no room before they came to a tier."""

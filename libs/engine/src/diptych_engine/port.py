"""The ports.

`Engine` is request-level: a worker gives it `SequenceWork` and hears of each step. Engines whose KV
Diptych moves itself implement the smaller `StepEngine`, and `step_loop.StepLoop` drives them:
continuous batching with chunked prefill, one thread, one call per step. Engines that move their own
KV (TensorRT-LLM, Triton, vLLM, SGLang) implement `request_port.RequestEngine`, and
`request_loop.RequestLoop` drives them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.handoffs import EngineHandOff, HandOffTerms
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import Chances, EndReason
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.embedder import Embedder
from diptych_engine.pins import PrefixPins


def never() -> bool:
    """False: nothing pauses the engine."""
    return False


class SequenceKey(NamedTuple):
    """One attempt at one request."""

    request_id: RequestId
    attempt: int


class Phase(StrEnum):
    """What an engine does for a sequence."""

    PREFILL = "prefill"
    """Compute the prompt's KV, export it, sample one token, stop."""
    DECODE = "decode"
    """Import KV, go on from the first token."""
    GENERATE = "generate"
    """Both."""


@dataclass(frozen=True, slots=True)
class KvBlock:
    """KV of positions [p0, p1) of one sequence, as bytes in the engine's layout."""

    p0: int
    p1: int
    data: memoryview


class BlockSink(Protocol):
    """Where a prefill's KV blocks go. Called on the engine's thread; must not block."""

    def buffer(self, index: int) -> memoryview:
        """Writable memory of at least one full block for block `index`."""
        ...

    def written(self, index: int, n_bytes: int) -> None:
        """Block `index` is final and lies in its buffer."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """What a worker asks of an engine."""

    key: SequenceKey
    phase: Phase
    prompt_ids: Sequence[int]
    """The prompt, without any answer token."""
    answer_ids: Sequence[int]
    """Answer tokens that exist already: context, not work. The next one has index len(...)."""
    sampling: Sampling
    stopping: Stopping
    tenant: str = ""
    """Whose it is: cached KV is never shared between tenants."""
    sink: BlockSink | None = None
    """PREFILL: where blocks go. GENERATE: where those of `wanted` go."""
    wanted: Collection[int] = ()
    """Full blocks of prompt and answer, by index, that are written to `sink` too."""
    restored: Sequence[KvBlock] = ()
    """PREFILL, GENERATE: full blocks that somebody kept, one after the other, to be imported where
    no cached prefix is as long; of use where one reaches the first of them. Should the engine
    refuse them, it computes. The last known token is always computed."""
    held_blocks: int = 0
    """PREFILL: leading blocks that go nowhere, unless they are `wanted`: decode has them."""
    blocks: Sequence[KvBlock] = ()
    """DECODE: verified KV of prompt and answer, all but the last token of `answer_ids`. Where they
    begin later, the engine has what comes before: `PrefixPins.pin` said so of this key."""
    keep: bool = False
    """DECODE: whether its KV may stay as a cached prefix; never if a lossy codec has changed it."""
    hand_off: EngineHandOff | None = None
    """DECODE, where the engine moves KV itself: what its prefill offered. Then no `blocks`."""
    on_imported: Callable[[], None] | None = None
    """Called on the engine's thread once `blocks`, or `restored`, are no longer needed.

    Not called where `SequenceFailed` or `SequenceAborted` says the same.
    """


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens sampled in one step. `index` counts from the answer's first token."""

    key: SequenceKey
    index: int
    token_ids: tuple[int, ...]
    """Empty where the model's end-of-text token ended the answer: it is not part of it. And of a
    PREFILL without `finish` where decode's first token counts (`FirstToken.DECODE`)."""
    finish: EndReason | None = None
    """STOP or LENGTH if the answer ends here. A PREFILL leaves after this news anyway."""
    logprobs: tuple[Chances, ...] = ()
    """One per token, where the work asks for them."""
    cached_tokens: int | None = None
    """Leading tokens whose KV was cached, where an engine says so with its first output only."""


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The engine gave a sequence up (no room, KV refused); everything it held is free."""

    key: SequenceKey
    reason: str
    detail: str = ""
    permanent: bool = False
    """Whether it would fail the same way anywhere."""


class SequenceStarted(NamedTuple):
    """The first compute (or the import) of a sequence has begun; where KV was restored, now."""

    key: SequenceKey
    cached_tokens: int = 0
    """Leading tokens of prompt and answer whose KV came from a cached prefix, or was restored."""


@dataclass(frozen=True, slots=True)
class SequenceAborted:
    """An abort took effect; everything the sequence held is free."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class HandOffReady:
    """PREFILL, where the engine moves KV itself: decode may be asked now.

    Before the first token where `HandOffTerms.pair_up_front`, else right before it.
    """

    key: SequenceKey
    hand_off: EngineHandOff


StepNews = NewTokens | SequenceFailed | SequenceStarted | SequenceAborted | HandOffReady


class Restored(NamedTuple):
    """KV that was imported instead of computed."""

    sequences: int = 0
    """Sequences that got theirs, all of it."""
    tokens: int = 0
    n_bytes: int = 0
    took_s: float = 0.0
    refused: int = 0
    """Sequences whose KV the engine refused: they are computed."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One engine step."""

    news: Sequence[StepNews]
    duration_s: float
    """Compute time of the step."""
    tokens_by_key: Mapping[SequenceKey, int] = field(default_factory=dict)
    """Tokens computed for each sequence: its share of the step's time and energy."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    accepted_drafts: int = 0
    """How many of the tokens told were drafted and then found right: they cost no step."""
    drafts: int = 0
    """Drafts that were looked at in this step; 0 where it is not said."""
    restored: Restored | None = None
    """What was imported of `SequenceWork.restored` before the step."""
    blocks_stored: tuple[int, ...] = ()
    """Hashes (`policy.prefixes`) of blocks that can be reused since the last report."""
    blocks_removed: tuple[int, ...] = ()
    """Hashes of those that no longer can."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is and how much it holds."""

    engine: str
    """Adapter and build."""
    fingerprint: Fingerprint
    layout: KvLayout
    context_tokens: int
    """Longest sequence."""
    kv_tokens: int
    """KV cells for all sequences together."""
    max_sequences: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    step_tokens: int = 256
    """Most tokens in one step."""
    prefix_sequences: int = 0
    """Sequence ids from `max_sequences` on that may hold cached prefixes; 0: no prefix reuse."""
    prefix_tokens: int = 0
    """Most KV cells that cached prefixes may hold."""
    embedding_size: int = 0
    """Numbers in the vector of a text; 0: it gives none."""
    embedding_tokens: int = 0
    """Longest text it makes a vector of."""
    hand_off: HandOffTerms | None = None
    """How it moves KV itself; None: Diptych moves it, or nobody does (`layout.slot_bytes` is 0)."""
    unsupported: tuple[str, ...] = ()
    """Parameters it cannot obey, of those in `contracts.cards.PARAMETERS`."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full an engine is."""

    running: int
    waiting: int
    waiting_tokens: int
    kv_tokens_used: int
    """Cells held or promised to admitted sequences (prompt and answer at full length).

    Cached prefixes do not count: they give way.
    """
    pinned_orphans: int = 0
    """Hand-offs whose KV the engine still holds and nobody has fetched, where it says so."""
    recomputed: int = 0
    """Hand-offs since it started whose KV decode computed again, where it says so."""


class Engine(Protocol):
    """A request-level engine. Methods are thread-safe and return at once."""

    @property
    def spec(self) -> EngineSpec:
        """What it is."""
        ...

    def submit(self, work: SequenceWork) -> None:
        """Queue `work`; news of it arrives through the listener.

        Raises:
            ValueError: if the same attempt is already here.
            RuntimeError: after `stop`.
        """
        ...

    def abort(self, key: SequenceKey) -> None:
        """Stop and free at the next step (one chunk at most); answered by `SequenceAborted`.

        An unknown key is answered too.
        """
        ...

    def forget(self, tenant: str) -> "Future[int]":
        """Keep no cached prefix of `tenant`; gives how many sequences were dropped.

        Sequences of it that run are not touched, and may be kept when they leave: abort them first.
        `stop` cancels the future.
        """
        ...

    def load(self) -> EngineLoad:
        """How full it is now."""
        ...

    @property
    def pins(self) -> PrefixPins | None:
        """What keeps cached prefixes for imported KV; None: it imports from the start only."""
        ...

    @property
    def gone(self) -> str | None:
        """Why the engine behind this one is dead or out of reach; None: it is not."""
        ...

    def embed(self, texts: Sequence[Sequence[int]]) -> "Future[NDArray[np.float32]]":
        """Vectors `[texts, embedding_size]` of length 1, computed beside generation.

        Cancel the future to stop: it ends within a chunk. `stop` cancels it.

        Raises:
            Refused: it gives none, or a text is empty or longer than `embedding_tokens`.
            RuntimeError: after `stop`.
        """
        ...

    def start(
        self, listener: Callable[[StepReport], None], *, paused: Callable[[], bool] = never
    ) -> None:
        """Begin. `listener` is called on the engine's thread once per step.

        What is known before a step computes (started, aborted, failed) comes in a report of its
        own, with duration 0. A step that only fills prompts has no news, but its cost. While
        `paused()` nothing is computed: what comes of it could not be told.
        """
        ...

    def stop(self) -> None:
        """Stop the thread and free the model. Work in progress is abandoned."""
        ...


@dataclass(frozen=True, slots=True)
class StepInput:
    """One token run of one sequence in a step."""

    seq: int
    """Sequence id in [0, max_sequences + prefix_sequences)."""
    position: int
    """Position of the first token."""
    token_ids: Sequence[int]
    want_logits: bool
    """Whether the logits after the last token are needed."""


class StepEngine(Protocol):
    """A model that computes batches. Used from one thread."""

    spec: EngineSpec

    @property
    def embedder(self) -> Embedder | None:
        """What makes vectors of texts, if it can."""
        ...

    @property
    def draft_tokens(self) -> int:
        """Tokens it drafts after each sampled one; 0: it does not."""
        ...

    def accepted_drafts(self, seq: int) -> int:
        """How many of the drafts after the last token of `seq` the model itself would have chosen.

        They may be computed one by one within the step that sampled that token. Needed where
        `draft_tokens` is not 0.
        """
        ...

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        """Compute one batch; per input the logits `[vocab]` of its last token, if wanted.

        The arrays are valid until the next step.
        """
        ...

    def export_block(self, seq: int, p0: int, p1: int, out: memoryview) -> int:
        """Write the KV of positions [p0, p1) into `out`; gives the number of bytes."""
        ...

    def import_block(self, seq: int, block: KvBlock) -> None:
        """Add `block` to `seq`. Raises `Unverified` if the engine refuses the bytes."""
        ...

    def fork(self, src_seq: int, dst_seq: int, p0: int, p1: int) -> bool:
        """Let `dst_seq`, which ends at `p0`, share the KV of `src_seq` at [p0, p1), uncopied.

        False if it cannot be continued so, which is never where `p0` is 0; then nothing has
        changed. Needed where `spec.prefix_sequences` is not 0.
        """
        ...

    def drop(self, seq: int) -> None:
        """Free all KV of `seq` that no other sequence shares."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...

"""The port of engines that schedule requests and move their KV themselves.

An adapter speaks one engine's own interface (an LLM object, gRPC, HTTP) and decides nothing else.
`request_loop.RequestLoop` makes an `Engine` of it: stop strings, cursors, limits and the order of
news are the loop's, once for all adapters.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.journal import Chances, EndReason
from diptych_engine.port import EngineSpec, SequenceWork


class TokenDelta(NamedTuple):
    """What came since the delta before: never cumulative, never a token twice."""

    token_ids: tuple[int, ...]
    finish: EndReason | None = None
    """STOP (the model's own end, not part of `token_ids`) or LENGTH, with the last one."""
    logprobs: tuple[Chances, ...] = ()
    """One per token, where the work asks for them."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV the engine had; None: not said."""
    accepted_drafts: int = 0
    """How many of `token_ids` came from accepted drafts."""
    recounted: bool = False
    """Whether these are not the engine's own tokens but its text's: then it may have counted as far
    as it was asked to before they are as many."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine says of itself; None: it does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_tokens_used: int | None = None
    pinned_orphans: int | None = None
    """Hand-offs whose KV prefill still holds and nobody has fetched."""
    recomputed: int | None = None
    """Hand-offs since the start whose KV decode has computed again instead of fetching it, without
    a word: vLLM does so where a transfer cannot begin."""


@dataclass(frozen=True, slots=True)
class KvStored:
    """Whole blocks whose KV the engine keeps, by their tokens: hashes are our own."""

    token_ids: tuple[int, ...]
    """Of the whole prefix up to the end of the last of these blocks."""
    engine_hashes: tuple[int, ...]
    """The engine's name for each block of the prefix, by which it tells of its removal."""
    tenant: str | None = None
    """`SequenceWork.tenant` of whose it is; None: not said, whoever sent such a prompt."""


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Blocks that are gone, by the engine's names."""

    engine_hashes: tuple[int, ...]


class KvCleared(NamedTuple):
    """Nothing is known any more: all was dropped, or events were missed."""


KvEvent = KvStored | KvRemoved | KvCleared


class RequestEngine(Protocol):
    """One engine. Used on one event loop, that of `RequestLoop`'s thread.

    `spec` is read after `start`. Cancelling `prefill` or closing `generate` aborts: it returns once
    the engine has let go of all that the request held (deferred where aborting at once does harm),
    and never raises for that. It is cancelled once at most, so it may wait while it is.

    Errors of all: `Refused` (no room, draining; elsewhere it may work), `Permanent` (bad
    parameters: nowhere), `EngineGone` (the engine is dead or unreachable).
    """

    @property
    def spec(self) -> EngineSpec:
        """What it is."""
        ...

    async def start(self) -> None:
        """Get ready. Raises `Permanent` with one clear line if it never will be."""
        ...

    async def prefill(
        self, work: SequenceWork, offer: Callable[[EngineHandOff], None]
    ) -> TokenDelta:
        """Compute the prompt, and `offer` its KV, once: before computing if paired up front.

        Gives the first token, or none where decode's counts. With `finish` the answer is complete
        and nothing needs to be handed over.
        """
        ...

    def generate(self, work: SequenceWork) -> AsyncGenerator[TokenDelta, None]:
        """The tokens after `work.answer_ids`, from `work.hand_off` if there is one.

        At most `work.stopping.max_tokens - len(work.answer_ids)`. Ends after a delta with `finish`;
        an engine that ends without one has failed. KV is reused within `work.tenant` only: by a
        salt of that name, or not at all. The name changes when a tenant is to be forgotten.
        """
        ...

    async def stats(self) -> EngineStats:
        """How full it is."""
        ...

    def kv_events(self) -> AsyncIterator[KvEvent]:
        """What it keeps and drops, for as long as it runs; ends at once if it does not tell."""
        ...

    async def health(self) -> None:
        """Ask the engine itself, not its port. Raises `EngineGone`."""
        ...

    async def close(self) -> None:
        """Let go of the engine."""
        ...

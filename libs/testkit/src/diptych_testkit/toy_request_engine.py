"""A toy that schedules requests and moves KV itself, as TensorRT-LLM, Triton, vLLM and SGLang do.

Its answers are those of `toy_engine`. KV "moves" through a `Wire` that both sides share: a prefill
pins its tokens there under a ticket, and decode takes them off. Nothing is told of a token twice,
nothing is left behind, unless a `Fault` says so.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.errors import EngineGone, Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff, FirstToken, HandOffTerms
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.journal import EndReason
from diptych_engine.port import EngineSpec, Phase, SequenceKey, SequenceWork
from diptych_engine.request_port import (
    EngineStats,
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    TokenDelta,
)
from diptych_engine.sampling import sample
from diptych_engine.sim import History, likeliest_after
from diptych_testkit.toy_engine import EOS_ID, toy_logits

VERSION = "1"


@dataclass(slots=True)
class Wire:
    """What engines of one fleet reach each other's KV through. Used on any of their threads."""

    pinned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Prompts whose KV waits to be fetched, by ticket."""
    tickets: "itertools.count[int]" = field(default_factory=itertools.count)
    recomputed: int = 0
    """What engines say of hand-offs whose KV they computed again."""


@dataclass(slots=True)
class Faults:
    """What goes wrong. All can be changed while it runs."""

    dies_after: int | None = None
    """The engine is gone for everybody once an answer has so many tokens."""
    dead: str | None = None
    """Why it is gone; None: it lives."""
    hangs_after: int | None = None
    """No more comes of an answer once it has so many tokens, until it is aborted."""
    repeats: int | None = None
    """The token at this place comes twice."""
    skips: int | None = None
    """The token at this place does not come."""
    breaks_off_after: int | None = None
    """An answer ends after so many tokens, without saying why."""
    cumulative: bool = False
    """Every delta begins at the first token again."""
    refuses: bool = False
    """Nothing is taken."""
    never_works: bool = False
    """Everything is called a bad request."""
    too_short: bool = False
    """An answer ends by its length before it has it."""
    never_lets_go: bool = False
    """An abort has no effect until `released`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToySettings:
    """The toy, and how it hands over."""

    first_token: FirstToken = FirstToken.PREFILL
    pair_up_front: bool = False
    hands_over: bool = True
    vocab_size: int = 1000
    block_tokens: int = 64
    context_tokens: int = 4096
    kv_tokens: int = 16_384
    max_sequences: int = 16
    eos_at: int | None = None
    """Length of a sequence after which the end of text follows; None: never."""
    delta_tokens: int = 1
    """Tokens told at once, all but one of them drafted."""
    token_s: float = 0.0
    """Between two deltas."""
    prefill_s: float = 0.0
    version: str = VERSION
    orphan_ms: int = 1000

    @property
    def terms(self) -> HandOffTerms:
        """How it hands over."""
        return HandOffTerms(
            kind="toy",
            engine_version=self.version,
            first_token=self.first_token,
            pair_up_front=self.pair_up_front,
            orphan_ms=self.orphan_ms,
        )


class ToyRequestEngine:
    """A deterministic `RequestEngine` without weights.

    Args:
        settings: What it is.
        wire: Shared with the engine on the other side of a hand-off.
    """

    def __init__(self, settings: ToySettings | None = None, *, wire: Wire | None = None) -> None:
        self.settings = settings or ToySettings()
        self.wire = wire or Wire()
        self.faults = Faults()
        self.held: set[SequenceKey] = set()
        """Requests the engine holds something of."""
        self.asked: list[SequenceWork] = []
        """All requests, as they came."""
        self.aborted: list[SequenceKey] = []
        self.released = asyncio.Event()
        self.started = self.closed = False
        self._events: asyncio.Queue[KvEvent] = asyncio.Queue(maxsize=1024)
        self.spec = _spec(self.settings)

    async def start(self) -> None:
        """Get ready."""
        if self.faults.never_works:
            raise Permanent("the toy is broken: it was told so")
        self._check_alive()
        self.started = True

    async def prefill(
        self, work: SequenceWork, offer: Callable[[EngineHandOff], None]
    ) -> TokenDelta:
        """The first token, or none; see `request_port.RequestEngine`."""
        async with self._holding(work):
            ids, finish = _Answer(work, self.settings).run(1)
            first = TokenDelta(tuple(ids), finish, cached_tokens=0)
            if first.finish is None and self.settings.pair_up_front:
                ticket = self._pin(work, offer)
                await self._compute_pinned(work, ticket)
            else:
                await self._compute(work)
                if first.finish is None:
                    self._pin(work, offer)
            self._keep(work)
            counts = self.settings.first_token is FirstToken.PREFILL or first.finish is not None
            return first if counts else TokenDelta(())

    async def generate(self, work: SequenceWork) -> AsyncGenerator[TokenDelta, None]:
        """The answer from here on; see `request_port.RequestEngine`."""
        async with self._holding(work):
            if work.phase is Phase.DECODE:
                self._fetch(work)
            else:
                await self._compute(work)
            async for delta in self._deltas(work):
                yield delta

    async def stats(self) -> EngineStats:
        """How full it is."""
        self._check_alive()
        return EngineStats(
            running=len(self.held),
            pinned_orphans=len(self.wire.pinned),
            recomputed=self.wire.recomputed,
        )

    async def kv_events(self) -> AsyncIterator[KvEvent]:
        """What it keeps of prompts; a block's name is that of its tokens and tenant."""
        while True:
            yield await self._events.get()

    async def health(self) -> None:
        """Raise `EngineGone` if it is dead."""
        self._check_alive()

    async def close(self) -> None:
        """Refuse all from now on."""
        self.closed = True

    def forget_kv(self, *names: int) -> None:
        """Drop blocks, all where none is named."""
        self._events.put_nowait(KvRemoved(names) if names else KvCleared())

    @asynccontextmanager
    async def _holding(self, work: SequenceWork) -> AsyncGenerator[None, None]:
        self.asked.append(work)
        self._check_alive()
        if self.faults.never_works:
            raise Permanent("the toy calls it a bad request: it was told so")
        if self.faults.refuses:
            raise Refused(RefusalReason.NO_ROOM, "the toy takes nobody: it was told so")
        if len(self.held) >= self.settings.max_sequences:
            raise AssertionError("the loop asks for more than max_sequences")
        self.held.add(work.key)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(work.key)
            raise
        finally:
            if self.faults.never_lets_go:
                await self.released.wait()
            self.held.discard(work.key)

    def _check_alive(self) -> None:
        if self.faults.dead is not None:
            raise EngineGone(self.faults.dead)

    async def _compute(self, work: SequenceWork) -> None:
        if self.faults.hangs_after == 0:
            await asyncio.Event().wait()
        await asyncio.sleep(self.settings.prefill_s)
        self._check_alive()

    async def _compute_pinned(self, work: SequenceWork, ticket: str) -> None:
        """Both legs meet: this one ends once the other one has the KV."""
        try:
            await self._compute(work)
            while ticket in self.wire.pinned:  # noqa: ASYNC110 - taken on another thread
                await asyncio.sleep(0.002)
        finally:
            self.wire.pinned.pop(ticket, None)

    def _pin(self, work: SequenceWork, offer: Callable[[EngineHandOff], None]) -> str:
        ticket = f"toy-{next(self.wire.tickets)}"
        self.wire.pinned[ticket] = tuple(work.prompt_ids)
        asyncio.get_running_loop().call_later(
            self.settings.orphan_ms / 1000, self.wire.pinned.pop, ticket, None
        )
        offer(EngineHandOff(terms=self.settings.terms, opaque=ticket.encode()))
        return ticket

    def _fetch(self, work: SequenceWork) -> None:
        assert work.hand_off is not None
        ticket = work.hand_off.opaque.decode()
        pinned = self.wire.pinned.pop(ticket, None)
        if pinned is None:
            raise Refused(RefusalReason.UNVERIFIED_KV, f"{ticket} was fetched or has expired")
        if pinned != tuple(work.prompt_ids):
            raise Refused(RefusalReason.UNVERIFIED_KV, f"{ticket} is of another prompt")

    async def _deltas(self, work: SequenceWork) -> AsyncGenerator[TokenDelta, None]:
        faults, answer = self.faults, _Answer(work, self.settings)
        told: list[int] = []
        while True:
            at = answer.length
            ids, finish = answer.run(self.settings.delta_tokens)
            drafted = max(0, len(ids) - 1)
            ids = _spoiled(ids, at, faults)
            told += ids
            if faults.too_short:
                finish = EndReason.LENGTH
            yield TokenDelta(tuple(told if faults.cumulative else ids), finish, (), None, drafted)
            if finish is not None:
                return
            await self._between(answer.length)
            if faults.breaks_off_after is not None and answer.length >= faults.breaks_off_after:
                return

    async def _between(self, at: int) -> None:
        faults = self.faults
        if faults.dies_after is not None and at >= faults.dies_after:
            faults.dead = f"the toy died after {at} tokens"
        if faults.hangs_after is not None and at >= faults.hangs_after:
            await asyncio.Event().wait()
        await asyncio.sleep(self.settings.token_s)
        self._check_alive()

    def _keep(self, work: SequenceWork) -> None:
        """Tell of the prompt's full blocks."""
        size = self.settings.block_tokens
        blocks = len(work.prompt_ids) // size
        ids = tuple(work.prompt_ids[: blocks * size])
        names = tuple(hash((work.tenant, ids[: (n + 1) * size])) for n in range(blocks))
        if blocks and not self._events.full():
            self._events.put_nowait(KvStored(ids, names))


class _Answer:
    """One answer on its way."""

    def __init__(self, work: SequenceWork, settings: ToySettings) -> None:
        self._work = work
        self._settings = settings
        self._history = History([*work.prompt_ids, *work.answer_ids])
        self._row = np.empty(settings.vocab_size, np.float32)

    @property
    def length(self) -> int:
        """Tokens of the answer so far."""
        return len(self._history.tokens) - len(self._work.prompt_ids)

    def run(self, most: int) -> tuple[list[int], EndReason | None]:
        """The next tokens, at most so many, and why the answer ends, if it does."""
        ids: list[int] = []
        while len(ids) < most:
            if self._ended():
                return ids, EndReason.STOP
            token = self._next()
            if token == EOS_ID and not self._work.stopping.ignore_eos:
                return ids, EndReason.STOP
            ids.append(token)
            self._history.tokens.append(ids[-1])
            if self.length >= self._work.stopping.max_tokens:
                return ids, EndReason.LENGTH
        return ids, None

    def _ended(self) -> bool:
        eos_at = self._settings.eos_at
        ignored = self._work.stopping.ignore_eos
        return eos_at is not None and len(self._history.tokens) >= eos_at and not ignored

    def _next(self) -> int:
        sampling = self._work.sampling
        if sampling.temperature == 0 and not sampling.logit_bias:
            return likeliest_after(self._history, range(1, self._settings.vocab_size))
        toy_logits(self._row, self._history)
        known, prompt = self._history.tokens, self._work.prompt_ids
        return sample(self._row, sampling, prompt_ids=prompt, answer_ids=known[len(prompt) :])


def _spoiled(ids: list[int], at: int, faults: Faults) -> list[int]:
    spoiled: list[int] = []
    for place, token in enumerate(ids, at):
        spoiled += [] if place == faults.skips else [token]
        spoiled += [token] if place == faults.repeats else []
    return spoiled


def _spec(settings: ToySettings) -> EngineSpec:
    return EngineSpec(
        engine=f"toy-requests-{settings.version}",
        fingerprint=Fingerprint(base="toy", weights="none"),
        layout=KvLayout(
            layout_id="toy",
            engine_build=settings.version,
            block_tokens=settings.block_tokens,
            slot_bytes=0,
            dtype="i32",
        ),
        context_tokens=settings.context_tokens,
        kv_tokens=settings.kv_tokens,
        max_sequences=settings.max_sequences,
        vocab_size=settings.vocab_size,
        eos_ids=(EOS_ID,),
        hand_off=settings.terms if settings.hands_over else None,
        unsupported=("logprobs", "top_logprobs"),
    )

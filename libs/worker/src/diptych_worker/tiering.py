"""KV tiers at work: what a prompt finds in them, and what of it goes there.

Before the engine gets a prompt, the blocks that its own prefix cache lacks are asked for, as far as
reading is believed to be faster than computing, and for no longer than computing would take. Which
blocks are written back is `policy.sightings`'s choice. Tiers only ever make an answer sooner:
whatever goes wrong in them, the prompt is computed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from diptych_contracts.control import TiersSnapshot
from diptych_contracts.ids import Incarnation
from diptych_contracts.tiers import TierKey
from diptych_engine.port import EngineSpec, KvBlock, StepReport
from diptych_kvtiers.finding import Found
from diptych_kvtiers.port import Entry
from diptych_kvtiers.stack import Forgotten, TierStack
from diptych_policy.prefixes import block_hashes
from diptych_policy.sightings import Sightings
from diptych_policy.tiering import RestoreCosts, tenant_tag, tier_keys
from diptych_telemetry import logger, names, tracer
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.attempts import Attempt
from diptych_worker.tier_metering import TierMetering
from diptych_worker.tier_writing import TierTee, TierWriting

log = logger("worker")
spans = tracer("worker")

_MANY_TOKENS = 16_384
"""More are hashed off the event loop: it would be gone for 2 ms."""
_HELD_BYTES = 256 * 1024 * 1024
"""Blocks that are being read, or were and are not in an engine yet, of all attempts together."""
_LEAST_S = 0.001
"""What saves less is not asked for."""
ALWAYS_S = 30.0
"""How long a read may take where nothing is compared."""


@dataclass(eq=False, slots=True)
class TierWork:
    """What the tiers have for one attempt."""

    restored: tuple[KvBlock, ...] = ()
    tee: TierTee | None = None
    """Takes the blocks that are to be written back; None: none is."""
    wanted: frozenset[int] = frozenset()
    """Which these are, by index."""
    leave: Callable[[], None] = lambda: None
    """To be called, from any thread, once `restored` is needed no more. Idempotent."""


NOTHING = TierWork()


@dataclass(slots=True)
class Tally:
    """What the tiers were good for, since the start."""

    restored: int = 0
    restored_tokens: int = 0
    late: int = 0
    refused: int = 0


class Tiering:
    """One worker's KV tiers. Used on the event loop only, unless said otherwise.

    Args:
        stack: The tiers, started.
        spec: Of the engine whose KV they hold.
        blocks: What its prefix cache holds.
        always: Restore whatever is found, without comparing.
        sightings: At which sighting a block is written.
    """

    def __init__(
        self,
        stack: TierStack,
        spec: EngineSpec,
        blocks: AnnouncedBlocks,
        *,
        always: bool = False,
        sightings: int = 2,
    ) -> None:
        self._stack = stack
        self._spec = spec
        self._blocks = blocks
        self._always = always
        self._size = spec.layout.block_tokens
        self._sightings = Sightings(needed=sightings)
        self._writing = TierWriting(self._put)
        self._held_bytes = 0
        self.costs = RestoreCosts(self._size, spec.layout.slot_bytes)
        self.tally = Tally()
        self._metering = TierMetering()

    async def work(self, attempt: Attempt) -> TierWork:
        """What the tiers have for `attempt`, whose prompt is here, and what they want of it."""
        generation = attempt.job.generation
        tokens = (*(attempt.prompt_ids or ()), *generation.prefix_ids)
        if len(tokens) <= self._size:
            return NOTHING
        orders = self._stack.orders
        keys, held = await self._names(generation.tenant, tokens)
        most = (len(tokens) - 1) // self._size
        with spans.start_as_current_span(names.KV_RESTORE) as span:
            data = await self._read(keys[held:most])
            span.set_attribute(names.TRANSFER_BLOCKS, len(data))
            span.set_attribute(names.RAW_BYTES, sum(len(one) for one in data))
        wanted = frozenset(i for i, key in enumerate(keys) if self._sightings.see(key.block))
        made = self._made(data, first=held)
        if wanted:
            slot_bytes = self._spec.layout.slot_bytes
            made.tee = TierTee(
                self._writing, keys, wanted=wanted, slot_bytes=slot_bytes, orders=orders
            )
            made.wanted = wanted
        return made

    def heard(self, report: StepReport) -> None:
        """The engine has filled prompts, or has taken in, or refused, what was read."""
        self.costs.prefilled(report.prefill_tokens, report.duration_s)
        restored = report.restored
        if restored is None:
            return
        self.costs.imported(restored.n_bytes, restored.took_s)
        self.tally.restored += restored.sequences
        self.tally.restored_tokens += restored.tokens
        self.tally.refused += restored.refused
        if restored.refused:
            log.warning("restored_kv_refused", sequences=restored.refused)

    async def forget(self, tenant: str) -> Forgotten:
        """Keep nothing of `tenant` in any tier."""
        return await self._stack.forget(tenant_tag(tenant))

    def snapshot(self, worker: Incarnation, tier: str = "") -> TiersSnapshot:
        """How they are, or how the one named `tier` is."""
        return TiersSnapshot(
            worker=worker,
            tiers=tuple(usage for usage in self._stack.usage() if tier in ("", usage.name)),
            restored=self.tally.restored,
            restored_tokens=self.tally.restored_tokens,
            late=self.tally.late,
            dropped=self._writing.dropped,
        )

    async def measure(self) -> None:
        """Tell Prometheus how they are."""
        counts = {**asdict(self.tally), "dropped": self._writing.dropped}
        self._metering.measured(self._stack.usage(), counts)

    async def close(self, timeout_s: float) -> None:
        """Write what waits to be written, and let go of the tiers."""
        await self._stack.flush(timeout_s)
        await self._stack.close()

    async def _names(self, tenant: str, tokens: Sequence[int]) -> tuple[tuple[TierKey, ...], int]:
        """The keys of all full blocks, and how many of these the prefix cache begins with."""

        def named() -> tuple[tuple[TierKey, ...], tuple[int, ...]]:
            spec = self._spec
            keys = tier_keys(tenant, spec.fingerprint, spec.layout, tokens)
            return keys, block_hashes(tenant, spec.fingerprint.base, tokens, self._size)

        many = len(tokens) > _MANY_TOKENS
        keys, hashes = await asyncio.to_thread(named) if many else named()
        return keys, self._blocks.leading(hashes)

    async def _read(self, keys: Sequence[TierKey]) -> list[Entry]:
        """The blocks of leading `keys` that are worth reading, as far as they are there in time."""
        keys = keys[: self._room]
        within_s = ALWAYS_S if self._always else self.costs.spare_s(len(keys))
        if not keys or within_s < _LEAST_S:
            return []
        found = await self._find(keys, within_s)
        blocks = found.n_blocks if self._always else self.costs.worth(self._reading_s(found))
        blocks = min(blocks, self._room)  # Others may have begun to read meanwhile.
        if not blocks:
            return []
        within_s = ALWAYS_S if self._always else self.costs.spare_s(blocks)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        n_bytes = blocks * self._spec.layout.slot_bytes
        self._held_bytes += n_bytes
        try:
            data = await self._stack.read(keys[:blocks], timeout_s=within_s)
        finally:
            self._held_bytes -= n_bytes
        if len(data) < blocks and loop.time() < until_s:
            self._sightings.lost(keys[len(data)].block)
        elif len(data) < blocks:
            self.tally.late += 1
        return data

    @property
    def _room(self) -> int:
        """How many blocks may be read now."""
        return max(0, _HELD_BYTES - self._held_bytes) // self._spec.layout.slot_bytes

    async def _find(self, keys: Sequence[TierKey], within_s: float) -> Found:
        found = Found()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                found = await self._stack.find(keys)
            for key in keys[found.n_blocks :]:
                self._sightings.lost(key.block)
        for key in keys[: found.n_blocks]:
            self._sightings.written(key.block)
        return found

    def _reading_s(self, found: Found) -> list[float]:
        """How long each block that was found is believed to take."""
        speeds = {usage.name: usage.read_bytes_per_s for usage in self._stack.usage()}
        n_bytes = self._spec.layout.slot_bytes
        return [
            n_bytes / speed if (speed := speeds.get(name, 0.0)) > 0 else 0.0 for name in found.tiers
        ]

    def _made(self, data: Sequence[Entry], *, first: int) -> TierWork:
        n_bytes = sum(len(one) for one in data)
        self._held_bytes += n_bytes
        loop, size = asyncio.get_running_loop(), self._size
        made = TierWork(
            restored=tuple(
                KvBlock(at * size, (at + 1) * size, memoryview(one).toreadonly())
                for at, one in enumerate(data, first)
            )
        )

        def let_go() -> None:
            if made.restored:
                made.restored = ()
                self._held_bytes -= n_bytes

        def leave() -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: this worker has ended.
                loop.call_soon_threadsafe(let_go)

        made.leave = leave
        return made

    def _put(self, key: TierKey, data: bytes, orders: int) -> None:
        if self._stack.put(key, data, orders=orders):
            self._sightings.written(key.block)

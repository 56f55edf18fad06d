"""Tiers, asked in turn from the fastest to the slowest.

A caller sees hits and misses and never an exception: what a tier cannot do is a miss, counted, and
that tier is left alone for a while that grows.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from diptych_contracts.errors import Unverified
from diptych_kvtiers.entry import Framer
from diptych_kvtiers.finding import Found, longest_run
from diptych_kvtiers.orders import Orders
from diptych_kvtiers.port import Entry, Tier, TierKey, TierUsage
from diptych_kvtiers.rung import Rung
from diptych_kvtiers.write_line import Waiting, WriteLine

log = logging.getLogger("diptych.kvtiers")

_FRAMERS = 2
_KEEP_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What became of the order to forget a tenant."""

    entries: int = 0
    unreachable: tuple[str, ...] = ()
    """Tiers that could not be reached: they are tried again, and give nothing of it meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLimits:
    """Bounds of a stack."""

    waiting_bytes: int = 256 * 1024**2
    """In the line of writes of one tier, and of blocks that are not framed yet; what does not fit
    is dropped. Lines share what waits in several."""
    writers: int = 4
    """Entries that are written to a tier at once."""
    start_s: float = 5.0
    """How long `start` waits for tiers to open."""
    find_s: float = 0.25
    """How long `find` waits for all tiers together."""
    at_once: int = 8
    """Blocks that one `read` asks for at once."""


@dataclass(frozen=True, slots=True)
class _Unframed:
    key: TierKey
    data: memoryview
    orders: int


class TierStack:
    """Tiers as one store. Use from one event loop, between `start` and `close`."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        fleet_key: bytes | None = None,
        limits: StackLimits | None = None,
    ) -> None:
        """Tiers, fastest first; with a `fleet_key` (32 bytes) entries are sealed with AES-GCM."""
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: expected each once, got {', '.join(names)}")
        self._limits = limits or StackLimits()
        self._framer = Framer(fleet_key)
        self._orders = Orders()
        self._rungs = [Rung(tier) for tier in tiers]
        limit = self._limits.waiting_bytes
        self._lines = [WriteLine(r, limit, is_over=self._orders.is_over) for r in self._rungs]
        self._unframed: deque[_Unframed] = deque()
        self._unframed_bytes = 0
        self._came, self._framed = asyncio.Event(), asyncio.Event()
        self._threads = ThreadPoolExecutor(_FRAMERS, thread_name_prefix="kv-tiers")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open the tiers; one that takes longer than `start_s` is away until it is open."""
        for rung, line in zip(self._rungs, self._lines, strict=True):
            writers = min(self._limits.writers, rung.tier.at_once)
            self._tasks += [asyncio.create_task(line.write()) for _ in range(writers)]
            self._tasks.append(asyncio.create_task(_keep(rung)))
        self._tasks.append(asyncio.create_task(self._frame()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.start_s):
                for rung in self._rungs:
                    await rung.tried.wait()

    async def find(self, keys: Sequence[TierKey]) -> Found:
        """The longest run of leading `keys` of which each is in some tier, found in one go."""
        if not keys:
            return Found()
        return await longest_run(self._rungs, keys, within_s=self._limits.find_s)

    async def read(self, keys: Sequence[TierKey], *, timeout_s: float) -> list[Entry]:
        """The verified blocks of leading `keys`, as `put` was given them.

        Fewer than asked for where one is missing, does not verify or is not there in `timeout_s`.
        """
        blocks: list[Entry] = []
        under_way: deque[asyncio.Task[Entry | None]] = deque()
        rest = iter(keys)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    while len(under_way) < self._limits.at_once and (key := next(rest, None)):
                        under_way.append(asyncio.create_task(self._block(key)))
                    block = await under_way[0] if under_way else None
                    if block is None:
                        break
                    under_way.popleft()
                    blocks.append(block)
        except TimeoutError:
            pass
        finally:
            await _cancelled(under_way)
        return blocks

    async def _block(self, key: TierKey) -> Entry | None:
        try:
            return await self._read(key)
        except Exception:
            log.exception("a block could not be read: a miss")
            return None

    async def _read(self, key: TierKey) -> Entry | None:
        """From the fastest tier that has it; the faster ones get it too."""
        orders = self._orders.count
        for n, rung in enumerate(self._rungs):
            entry = await rung.get(key)
            if entry is None:
                continue
            block = await self._opened(rung, key, entry)
            if block is None:
                continue
            if self._orders.is_over(key.tenant_tag, orders):
                return None
            for line in self._lines[:n]:
                line.offer(Waiting(key, entry, orders))
            return block
        return None

    async def _opened(self, rung: Rung, key: TierKey, entry: Entry) -> Entry | None:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._framer.opened, key, entry)
        except Unverified as err:
            log.warning("tier %s: %s (%s): dropped", rung.name, err, err.reason)
            await rung.drop_corrupt(key)
            return None

    @property
    def orders(self) -> int:
        """How many orders to forget a tenant have come: who begins work for one notes it."""
        return self._orders.count

    def put(self, key: TierKey, data: Entry, *, orders: int | None = None) -> bool:
        """Store a block in every tier, by and by. False: dropped, the lines of writes are full.

        Never waits. Nobody may change what is under `data` any more. With the `orders` there were
        when the work began that gave it, nothing is stored if its tenant was forgotten since.
        """
        orders = self._orders.count if orders is None else orders
        if self._orders.is_over(key.tenant_tag, orders):
            return False
        block = memoryview(data).cast("B")
        if self._unframed_bytes + block.nbytes > self._limits.waiting_bytes:
            for rung in self._rungs:
                rung.counts.dropped += 1
            return False
        self._unframed.append(_Unframed(key, block, orders))
        self._unframed_bytes += block.nbytes
        self._came.set()
        return True

    async def _frame(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._unframed:
                self._came.clear()
                await self._came.wait()
            block = self._unframed[0]
            try:
                entry = await loop.run_in_executor(
                    self._threads, self._framer.framed, block.key, block.data
                )
                for line in self._lines:
                    line.offer(Waiting(block.key, entry, block.orders))
            except Exception:
                log.exception("a block could not be framed: dropped")
            finally:
                self._unframed.popleft()
                self._unframed_bytes -= block.data.nbytes
                self._framed.set()

    async def forget(self, tenant_tag: str) -> Forgotten:
        """Remove everything of a tenant, also what waits to be written or is being read.

        What is put later is kept, except in tiers that could not be reached.
        """
        self._orders.give(tenant_tag)
        told = await asyncio.gather(*(self._forget_in(line, tenant_tag) for line in self._lines))
        return Forgotten(
            entries=max((n for n in told if n is not None), default=0),
            unreachable=tuple(
                rung.name for rung, n in zip(self._rungs, told, strict=True) if n is None
            ),
        )

    async def _forget_in(self, line: WriteLine, tenant_tag: str) -> int | None:
        line.rung.forgetting.add(tenant_tag)
        await line.settled(tenant_tag)
        return await line.rung.forget(tenant_tag)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is written or dropped; False if `timeout_s` ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._unframed:
                    self._framed.clear()
                    await self._framed.wait()
                for line in self._lines:
                    await line.empty()
        except TimeoutError:
            return False
        return True

    def usage(self) -> tuple[TierUsage, ...]:
        """How each tier fares, fastest first."""
        return tuple(line.rung.usage(line.n_bytes) for line in self._lines)

    async def close(self) -> None:
        """Stop writing (what waits is dropped) and let go of the tiers."""
        await _cancelled(self._tasks)
        self._tasks.clear()
        for rung in self._rungs:
            await rung.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _keep(rung: Rung) -> None:
    while True:
        await rung.keep()
        await asyncio.sleep(_KEEP_EVERY_S)


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and wait for their ends."""
    held = list(tasks)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)

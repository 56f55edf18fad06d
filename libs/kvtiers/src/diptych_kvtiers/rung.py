"""One tier of a stack: asked with patience and a deadline, counted, and never raising.

What the tier cannot do is a miss here. Whatever it raises counts as being away; only what is no
`TierAway` is logged with its trace, for it is somebody's bug.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from diptych_kvtiers.patience import Patience
from diptych_kvtiers.port import Entry, Tier, TierAway, TierFull, TierKey, TierUsage
from diptych_kvtiers.speed import Speed

T = TypeVar("T")

log = logging.getLogger("diptych.kvtiers")

_GRACE_S = 0.5
"""Beyond what a tier says of itself: it should answer first."""
LONG_S = 60.0
"""For what looks at all of a store: opening, tending, forgetting a tenant."""
TEND_EVERY_S = 60.0
_NEVER = float("-inf")


@dataclass(slots=True)
class Counts:
    """Since the start; see `TierUsage`."""

    hits: int = 0
    misses: int = 0
    errors: int = 0
    corrupt: int = 0
    stored: int = 0
    dropped: int = 0


class Rung:
    """A tier and how it fares."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.counts = Counts()
        self.speed = Speed(tier.guess_bytes_per_s)
        self.forgetting: set[str] = set()
        """Tenants whose entries may still be there: nothing of theirs is read or written."""
        self.tried = asyncio.Event()
        """It was opened, or could not be."""
        self._turns = asyncio.Semaphore(tier.at_once)
        self._asking = Patience()
        self._storing = Patience()
        """A full store is left alone by those who write only."""
        self._is_open = False
        self._tended_s = _NEVER

    @property
    def name(self) -> str:
        """Of the tier."""
        return self.tier.name

    async def sizes(self, keys: Sequence[TierKey]) -> Sequence[int]:
        """See the port; none where the tier is away."""
        async with self._turns:
            if not self._askable(keys[0].tenant_tag):
                return ()
            return await self._asked(self.tier.sizes(keys), self.tier.timeout_s) or ()

    async def get(self, key: TierKey) -> Entry | None:
        """See the port; a miss where the tier is away."""
        async with self._turns:
            entry = await self._got(key) if self._askable(key.tenant_tag) else None
        if entry is None:
            self.counts.misses += 1
        else:
            self.counts.hits += 1
        return entry

    async def _got(self, key: TierKey) -> Entry | None:
        entry: Entry | None = None
        self.speed.began(time.monotonic())
        try:
            entry = await self._asked(self.tier.get(key), self.tier.timeout_s)
        finally:
            self.speed.ended(time.monotonic(), len(entry) if entry is not None else 0)
        return entry

    async def put(self, key: TierKey, entry: Entry) -> bool:
        """Store it, unless it is there; False where that did not work."""
        done = False
        if self._askable(key.tenant_tag) and self._storing.allows(time.monotonic()):
            done = bool(await self._asked(self._stored(key, entry), 2 * self.tier.timeout_s))
        if done:
            self._storing.answered()
            self.counts.stored += 1
        else:
            self.counts.dropped += 1
        return done

    async def _stored(self, key: TierKey, entry: Entry) -> bool:
        if not await self.tier.sizes((key,)):
            await self.tier.put(key, entry)
        return True

    async def drop_corrupt(self, key: TierKey) -> None:
        """Remove an entry that did not verify: it was a miss after all."""
        self.counts.corrupt += 1
        self.counts.hits -= 1
        self.counts.misses += 1
        await self._asked(self.tier.drop(key), self.tier.timeout_s)

    async def forget(self, tenant_tag: str) -> int | None:
        """Remove all of a tenant's; None: not yet, it is tried again by `keep`."""
        self.forgetting.add(tenant_tag)
        if not self._is_open or not self._asking.allows(time.monotonic()):
            return None
        entries = await self._asked(self.tier.forget(tenant_tag), LONG_S)
        if entries is not None:
            self.forgetting.discard(tenant_tag)
        return entries

    async def keep(self) -> None:
        """Do what is due: open, forget, tend. Called about once a second."""
        now_s = time.monotonic()
        if not self._is_open:
            if self._asking.allows(now_s):
                self._is_open = bool(await self._asked(_done(self.tier.open()), LONG_S))
                self.tried.set()
            return
        for tenant_tag in tuple(self.forgetting):
            await self.forget(tenant_tag)
        if now_s - self._tended_s >= TEND_EVERY_S and not self._asking.why:
            self._tended_s = now_s
            await self._asked(_done(self.tier.tend()), LONG_S)

    def usage(self, waiting_bytes: int) -> TierUsage:
        """What the tier says of itself, and what was counted."""
        return msgspec.structs.replace(
            self.tier.usage(),
            **{name: getattr(self.counts, name) for name in Counts.__slots__},
            away=self._asking.why or self._storing.why or ("" if self._is_open else "not open yet"),
            forgetting=len(self.forgetting),
            read_bytes_per_s=self.speed.bytes_per_s,
            waiting_bytes=waiting_bytes,
        )

    async def close(self) -> None:
        """Let go of the tier."""
        await self._asked(self.tier.close(), self.tier.timeout_s)

    def _askable(self, tenant_tag: str) -> bool:
        if not self._is_open or tenant_tag in self.forgetting:
            return False
        return self._asking.allows(time.monotonic())

    async def _asked(self, call: Awaitable[T], within_s: float) -> T | None:
        """What the tier answers; None, counted and remembered, where it does not."""
        try:
            async with asyncio.timeout(within_s + _GRACE_S):
                answer = await call
        except TierFull as err:
            self._asking.answered()
            self._failed(self._storing, str(err))
        except TierAway as err:
            self._failed(self._asking, str(err))
        except TimeoutError:
            self._failed(self._asking, f"no answer in {within_s + _GRACE_S:.1f} s")
        except Exception as err:
            log.exception("tier %s failed in a way of its own", self.name)
            self._failed(self._asking, f"{type(err).__name__}: {err!s:.200}")
        else:
            if self._asking.why:
                log.info("tier %s answers again", self.name)
            self._asking.answered()
            return answer
        return None

    def _failed(self, patience: Patience, why: str) -> None:
        self.counts.errors += 1
        if not patience.why:
            log.warning("tier %s is left alone: %s", self.name, why)
        patience.failed(time.monotonic(), why)


async def _done(call: Awaitable[None]) -> bool:
    await call
    return True

"""Rate limits at this gateway: shares of what all gateways may give, by key and by tenant.

A request of a caller without limits costs nothing here. One with limits takes out of the share that
this gateway holds (a few additions); when that is too small, it waits for one exchange with bucket
`allowances`, together with everybody else who waits for the same. While the bus is away nothing is
exchanged: what is held may still be spent, and the rest is told 503, as every request would be.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from diptych_bus.port import Bus
from diptych_contracts.allowances import Allowance
from diptych_contracts.errors import BusAway, Conflict, DiptychError
from diptych_contracts.ids import Incarnation
from diptych_contracts.streams import ALLOWANCE_TTL_S, ALLOWANCES
from diptych_gateway import metrics
from diptych_gateway.errors import ApiError, Headers
from diptych_gateway.tenancy.callers import Caller, Holder
from diptych_policy.allowances import Wish, exchange
from diptych_policy.shares import Kind, Share, Shortage
from diptych_telemetry import logger

TICK_S = 1.0
_EXCHANGE_S = 2.0
_PLACE_TRIES, _PLACE_PAUSE_S = 4, 0.05
"""A client that goes to another gateway right after an answer is there before its place is."""
_AT_ONCE = 16
"""Exchanges at a tick."""
_NAMES = {Kind.REQUESTS: "requests", Kind.TOKENS: "tokens"}

log = logger(__name__)


@dataclass(slots=True)
class Taking:
    """What one request has taken; settled once."""

    allowances: "Allowances"
    tokens: int
    of: list[tuple[str, Share]] = field(default_factory=list)

    def settle(self, used_tokens: int) -> None:
        """The request is over, and used so many tokens."""
        for name, share in self._once():
            share.settle(self.tokens, used_tokens)
            self.allowances.released(name, share)

    def undo(self) -> None:
        """The request does not run after all."""
        for name, share in self._once():
            share.undo(self.tokens)
            self.allowances.released(name, share)

    def _once(self) -> list[tuple[str, Share]]:
        taken, self.of = self.of, []
        return taken


class Allowances:
    """The shares of this gateway.

    Args:
        bus: Where the records are, and whose clock they refill by.
        gateway: This one.
        now_s: The monotonic clock.
    """

    def __init__(self, bus: Bus, gateway: Incarnation, now_s: Callable[[], float]) -> None:
        self._bus = bus
        self._bucket = bus.bucket(ALLOWANCES, Allowance)
        self._gateway = gateway
        self._now_s = now_s
        self._shares: dict[str, Share] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._urgent: set[str] = set()
        self._news = asyncio.Event()

    def check(self, caller: Caller, requests: int = 1) -> None:
        """Raise `ApiError` if `caller` has just been told no: before its prompt costs anything.

        Also if it asks for more `requests` at once than it may ever have.
        """
        for holder in caller.holders:
            share = self._share(holder)
            shortage = share.impossible(0, requests) or share.shortage(0, now_s=self._now_s())
            if shortage is not None:
                raise self._refusal(shortage, holder)

    async def take(self, caller: Caller, tokens: int) -> Taking | None:
        """Take what a request of `tokens` needs; None: nothing is limited.

        Raises:
            ApiError: a limit is reached (429), with the time to ask again.
            Transient: the bus is away, and too little is held here.
        """
        if not caller.holders:
            return None
        taking = Taking(self, tokens)
        try:
            for holder in caller.holders:
                share = self._share(holder)
                if not share.take(tokens, now_s=self._now_s()):
                    await self._obtain(holder, share, tokens)
                taking.of.append((holder.name, share))
        except BaseException:
            taking.undo()
            raise
        return taking

    def released(self, name: str, share: Share) -> None:
        """A request is over: where others wait for its place, it goes back now."""
        if share.contended:
            self._urgent.add(name)
            self._news.set()

    def headers(self, caller: Caller) -> Headers:
        """`x-ratelimit-…`: of all limits of a kind, the one that is nearest."""
        headers: Headers = []
        now_s = self._now_s()
        for kind, name in _NAMES.items():
            known = [self._share(h).remaining(kind, now_s=now_s) for h in caller.holders]
            limited = [remaining for remaining in known if remaining is not None]
            if not limited:
                continue
            nearest = min(limited, key=lambda remaining: remaining.remaining)
            for what, value in (
                ("limit", str(nearest.limit)),
                ("remaining", str(nearest.remaining)),
                ("reset", duration(nearest.reset_s)),
            ):
                headers.append((f"x-ratelimit-{what}-{name}".encode(), value.encode()))
        return headers

    async def run(self) -> None:
        """Bring back what is over, and say which places are held, until cancelled."""
        while True:
            due = await self._next_due()
            for start in range(0, len(due), _AT_ONCE):
                await asyncio.gather(*map(self._bring_back, due[start : start + _AT_ONCE]))

    async def give_back(self, timeout_s: float) -> None:
        """Bring back all that is held: this gateway leaves. What is not done in time is lost."""
        held = [name for name, share in self._shares.items() if not share.idle]
        for name in held:
            self._shares[name].retire()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for name in held:
                    await self._bring_back(name)

    async def _next_due(self) -> list[str]:
        try:
            async with asyncio.timeout(TICK_S):
                await self._news.wait()
        except TimeoutError:
            now_s = self._now_s()
            for name in [n for n, share in self._shares.items() if share.idle]:
                if not self._locks[name].locked():
                    del self._shares[name], self._locks[name]
            return [name for name, share in self._shares.items() if share.tick(now_s=now_s)]
        self._news.clear()
        urgent, self._urgent = list(self._urgent), set()
        return [name for name in urgent if name in self._shares]

    async def _bring_back(self, name: str) -> None:
        share = self._shares.get(name)
        if share is None:
            return
        async with self._locks[name]:
            wish = share.wish(self._gateway, tokens=None, now_s=self._now_s())
            try:
                await self._exchange(name, share, wish)
            except DiptychError as err:
                log.debug("allowance_not_brought_back", holder=name, error=str(err))

    async def _obtain(self, holder: Holder, share: Share, tokens: int) -> None:
        impossible = share.impossible(tokens)
        shortage = impossible or share.shortage(tokens, now_s=self._now_s())
        if shortage is not None:
            raise self._refusal(shortage, holder)
        share.queue(tokens)
        try:
            for pause in range(_PLACE_TRIES):
                await asyncio.sleep(_PLACE_PAUSE_S if pause else 0)
                shortage = await self._asked(holder.name, share, tokens)
                if shortage is None:
                    return
                if shortage.kind is not Kind.PLACES:
                    break
        finally:
            share.unqueue(tokens)
        assert shortage is not None
        raise self._refusal(shortage, holder)

    async def _asked(self, name: str, share: Share, tokens: int) -> Shortage | None:
        """Take, after an exchange if need be; gives why it could not be."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if share.take(tokens, now_s=self._now_s()):  # somebody's exchange brought it
                return None
            wish = share.wish(self._gateway, tokens=tokens, now_s=self._now_s())
            await self._exchange(name, share, wish)
            if share.take(tokens, now_s=self._now_s()):
                return None
            return share.denied(tokens, now_s=self._now_s())

    async def _exchange(self, name: str, share: Share, wish: Wish) -> None:
        """Raises `Transient`: nothing was gained, and whether the record was changed is unknown."""
        try:
            async with asyncio.timeout(_EXCHANGE_S):
                while not await self._swapped(name, share, wish):
                    pass
        except TimeoutError as err:
            raise BusAway("the rate limit could not be looked up") from err

    async def _swapped(self, name: str, share: Share, wish: Wish) -> bool:
        kept = await self._bucket.get(name)
        made, grant = exchange(
            kept.value if kept is not None else None,
            share.limits,
            wish,
            now_unix_ms=self._bus.unix_ms(),
        )
        try:
            if kept is None:
                await self._bucket.create(name, made, ttl_s=ALLOWANCE_TTL_S)
            else:
                await self._bucket.update(name, made, kept.revision, ttl_s=ALLOWANCE_TTL_S)
        except Conflict:
            return False
        share.granted(grant, now_s=self._now_s())
        return True

    def _share(self, holder: Holder) -> Share:
        share = self._shares.get(holder.name)
        if share is None:
            share = self._shares[holder.name] = Share(holder.limits)
            self._locks[holder.name] = asyncio.Lock()
        elif share.limits is not holder.limits and share.limits != holder.limits:
            share.limits = holder.limits
        return share

    def _refusal(self, shortage: Shortage, holder: Holder) -> ApiError:
        metrics.refused(f"limit_of_{shortage.kind.name.lower()}", "any")
        whose = holder.name.partition(".")[0]
        limit, needed = shortage.limit, shortage.needed
        match shortage.kind:
            case Kind.REQUESTS:
                text = f"this {whose} may make {limit} requests per minute, saw {needed} more"
            case Kind.TOKENS:
                text = (
                    f"this {whose} may use {limit} tokens per minute, "
                    f"and this request may take {needed}"
                )
            case Kind.PLACES:
                text = f"this {whose} may have {limit} requests at once, saw {needed} more"
        error = ApiError(
            429,
            f"rate limit reached: {text}",
            code="rate_limit_exceeded",
            retry_after_s=shortage.retry_after_s,
        )
        if shortage.retry_after_s is None:
            error.should_retry = False
        return error


def duration(seconds: float) -> str:
    """A time as OpenAI's headers write it: `6m0s`, `1.5s`, `20ms`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"

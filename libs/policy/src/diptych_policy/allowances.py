"""Limits that gateways share: how a record of what is left is divided among them.

Requests and tokens are buckets of one minute's size that refill evenly: after a quiet minute the
whole of it may go at once, and in the long run no more than the limit. A gateway takes amounts out
of the record before it spends them and brings back what is over, so all of them together never
spend more than the record gave: the slack is on the other side. What a gateway holds (about what it
spent in the last second) others do not see, and what a dead one held is lost until it has refilled.

Places (requests at once) are held, not spent: a gateway says every few seconds how many it has, and
those of one that fell silent go to the others after `PLACES_TTL_MS`.
"""

from dataclasses import dataclass

from diptych_contracts.allowances import Allowance, Places
from diptych_contracts.ids import Incarnation
from diptych_contracts.keys import RateLimits

MINUTE_MS = 60_000
MINUTE_S = 60.0
PLACES_TTL_MS = 10_000


@dataclass(frozen=True, slots=True)
class Amount:
    """Of requests and of tokens."""

    requests: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a gateway brings and wants."""

    gateway: Incarnation
    back: Amount = Amount()
    need: Amount = Amount()
    """Of each kind all of it, or nothing."""
    more: Amount = Amount()
    """As far as there is."""
    places: int = 0
    """How many it wants to hold, those it has included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What it got, and what is left for anybody."""

    taken: Amount
    left: Amount
    places: int
    """How many it holds now."""
    free_places: int


def exchange(
    allowance: Allowance | None, limits: RateLimits, wish: Wish, *, now_unix_ms: int
) -> tuple[Allowance, Grant]:
    """The record after `wish`, and what that was granted. Without a record all is there."""
    elapsed_ms, at_unix_ms = MINUTE_MS, now_unix_ms
    held: tuple[Places, ...] = ()
    left = Amount()
    if allowance is not None:
        elapsed_ms = max(0, now_unix_ms - allowance.at_unix_ms)
        at_unix_ms = max(now_unix_ms, allowance.at_unix_ms)
        left = Amount(allowance.requests, allowance.tokens)
        held = allowance.places
    requests, got_requests = _poured(
        left.requests + wish.back.requests,
        limits.requests_per_minute,
        elapsed_ms=elapsed_ms,
        need=wish.need.requests,
        more=wish.more.requests,
    )
    tokens, got_tokens = _poured(
        left.tokens + wish.back.tokens,
        limits.tokens_per_minute,
        elapsed_ms=elapsed_ms,
        need=wish.need.tokens,
        more=wish.more.tokens,
    )
    others = tuple(
        p
        for p in held
        if p.gateway != wish.gateway and now_unix_ms - p.unix_ms < PLACES_TTL_MS and p.count
    )
    free = (limits.concurrency or 0) - sum(p.count for p in others)
    places = max(0, min(wish.places, free))
    own = (Places(gateway=wish.gateway, count=places, unix_ms=now_unix_ms),) if places else ()
    made = Allowance(
        requests=requests, tokens=tokens, at_unix_ms=at_unix_ms, places=(*others, *own)
    )
    return made, Grant(
        taken=Amount(got_requests, got_tokens),
        left=Amount(requests, tokens),
        places=places,
        free_places=max(0, free - places),
    )


def _poured(
    level: float, limit: int | None, *, elapsed_ms: int, need: float, more: float
) -> tuple[float, float]:
    """What is left of a bucket after it refilled, and what was taken out of it."""
    if limit is None:
        return 0.0, 0.0
    level = min(float(limit), level + limit * elapsed_ms / MINUTE_MS)
    taken = min(level, need + more) if level >= need else 0.0
    return level - taken, taken

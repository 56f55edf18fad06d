"""One gateway's share of a limit: what it may spend without asking the others."""

from dataclasses import dataclass
from enum import Enum, auto

from diptych_contracts.ids import Incarnation
from diptych_contracts.keys import RateLimits
from diptych_policy.allowances import MINUTE_S, Amount, Grant, Wish

KEPT_FOR_S = 2.0
"""What was not used for so long goes back, all of it."""
RENEW_S = 3.0
"""How often held places are said again: a third of the time they count."""
ASK_AGAIN_S = 0.25
"""After a no for want of places: others may have given one back."""
_MAX_BLIND_S = 1.0
"""After a no for want of requests or tokens: others may have brought some back."""
_EXTRA = 0.25
"""Of what is left a gateway takes no more than this beyond what is asked of it now."""
MIN_RETRY_S = 1.0


class Kind(Enum):
    """What a limit is of."""

    REQUESTS = auto()
    TOKENS = auto()
    PLACES = auto()


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a request is not taken now."""

    kind: Kind
    limit: int
    needed: int
    retry_after_s: float | None
    """None: never, it asks for more than the limit is."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a client is told of one limit."""

    limit: int
    remaining: int
    reset_s: float
    """Until all of it is there again."""


class Share:
    """What this gateway holds of one limit.

    Args:
        limits: What is limited; may change at any time.
    """

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self.held = Amount()
        self.places = 0
        self.running = 0
        """Requests that have a place."""
        self.waiting = 0
        self._waiting_tokens = 0.0
        self._left = Amount(limits.requests_per_minute or 0, limits.tokens_per_minute or 0)
        """For anybody, when last heard."""
        self.free_places = limits.concurrency or 0
        self._heard_s = 0.0
        self._spent = Amount()
        """Since the last tick."""
        self._spent_before = Amount()
        """In the second before it."""
        self._spent_s = 0.0
        """When last something was spent."""
        self._denied_s = 0.0
        self._renewed_s = 0.0

    # A request

    def impossible(self, tokens: int, requests: int = 1) -> Shortage | None:
        """Why `requests` at once, one of them of `tokens`, can never be taken, if so."""
        limits = self.limits
        for kind, most, needed in (
            (Kind.TOKENS, limits.tokens_per_minute, tokens),
            (Kind.PLACES, limits.concurrency, requests),
            (Kind.REQUESTS, limits.requests_per_minute, requests),
        ):
            if most is not None and needed > most:
                return Shortage(kind, most, needed, None)
        return None

    def take(self, tokens: int, *, now_s: float) -> bool:
        """Take what a request of `tokens` needs out of what is held; False: ask for more."""
        if self._short(tokens):
            return False
        limits, held = self.limits, self.held
        self.held = Amount(
            held.requests - (limits.requests_per_minute is not None),
            held.tokens - (tokens if limits.tokens_per_minute is not None else 0),
        )
        self._spent = Amount(self._spent.requests + 1, self._spent.tokens + tokens)
        self._spent_s = now_s
        self.running += 1
        return True

    def shortage(self, tokens: int, *, now_s: float) -> Shortage | None:
        """Why asking for more is of no use now, by what was last heard."""
        kinds = self._short(tokens)
        if not kinds or now_s >= self._denied_s:
            return None
        return max(
            (self._described(kind, tokens, now_s=now_s) for kind in kinds),
            key=lambda s: s.retry_after_s or 0.0,
        )

    def settle(self, reserved: int, used: int) -> None:
        """A request is over that took `reserved` tokens and used `used`."""
        self.running -= 1
        if self.limits.tokens_per_minute is not None:
            self.held = Amount(self.held.requests, self.held.tokens + max(0, reserved - used))

    def undo(self, reserved: int) -> None:
        """A request that was taken does not run after all."""
        self.settle(reserved, 0)
        if self.limits.requests_per_minute is not None:
            self.held = Amount(self.held.requests + 1, self.held.tokens)

    # The record

    def queue(self, tokens: int) -> None:
        """One more request waits for the next exchange."""
        self.waiting += 1
        self._waiting_tokens += tokens

    def unqueue(self, tokens: int) -> None:
        """It waits no more."""
        self.waiting -= 1
        self._waiting_tokens -= tokens

    def tick(self, *, now_s: float) -> bool:
        """A second is over: whether something should be brought back, or said again."""
        self._spent_before, self._spent = self._spent, Amount()
        if self._surplus(now_s=now_s) != Amount() or self.places > self.running:
            return True
        return bool(self.places) and now_s - self._renewed_s >= RENEW_S

    def retire(self) -> None:
        """This gateway leaves: all that it holds is over."""
        self._spent = self._spent_before = Amount()

    @property
    def contended(self) -> bool:
        """Whether a place that falls free here should go back at once."""
        return self.limits.concurrency is not None and not self.free_places

    @property
    def idle(self) -> bool:
        """Whether it may be forgotten."""
        return not (self.running or self.waiting or self.places) and self.held == Amount()

    def wish(self, gateway: Incarnation, *, tokens: int | None, now_s: float) -> Wish:
        """What to bring and ask for, `tokens` for a request that waits now, if one does.

        What is brought back is held no more from here on, whatever becomes of the exchange.
        """
        back = self._surplus(now_s=now_s) if tokens is None else Amount()
        self.held = Amount(self.held.requests - back.requests, self.held.tokens - back.tokens)
        need, more, places, late = Amount(), Amount(), self.running, self._of_late
        if tokens is not None:
            need = self._lacking(1, tokens)
            others = self._lacking(self.waiting, self._waiting_tokens)
            more = Amount(
                max(others.requests - need.requests, min(late.requests, self._quarter[0])),
                max(others.tokens - need.tokens, min(late.tokens, self._quarter[1])),
            )
            places = max(self.places, self.running + self.waiting)
        self.places = min(self.places, places)
        return Wish(gateway=gateway, back=back, need=need, more=more, places=places)

    def granted(self, grant: Grant, *, now_s: float) -> None:
        """Take in what an exchange brought."""
        taken = grant.taken
        self.held = Amount(self.held.requests + taken.requests, self.held.tokens + taken.tokens)
        self._left, self._heard_s = grant.left, now_s
        self.places, self.free_places = grant.places, grant.free_places
        self._renewed_s = now_s

    def denied(self, tokens: int, *, now_s: float) -> Shortage | None:
        """Why the exchange that just was did not bring enough; None: it did."""
        if not self._short(tokens):
            return None
        self._denied_s = now_s + ASK_AGAIN_S
        shortage = self.shortage(tokens, now_s=now_s)
        assert shortage is not None
        if shortage.kind is not Kind.PLACES and shortage.retry_after_s is not None:
            self._denied_s = now_s + min(_MAX_BLIND_S, shortage.retry_after_s)
        return shortage

    def remaining(self, kind: Kind, *, now_s: float) -> Remaining | None:
        """What is left of a limit as far as this gateway knows; None: it has none."""
        limits = self.limits
        limit = limits.requests_per_minute if kind is Kind.REQUESTS else limits.tokens_per_minute
        if limit is None:
            return None
        left = min(float(limit), self._available(kind, now_s=now_s))
        reset_s = (limit - left) / limit * MINUTE_S if limit else 0.0
        return Remaining(limit, int(left), reset_s)

    def check(self) -> None:
        """Raise if an invariant is broken."""
        if self.held.requests < 0 or self.held.tokens < 0 or self.running < 0 or self.waiting < 0:
            raise AssertionError(f"overspent: {self.held}, {self.running} run")

    @property
    def _quarter(self) -> tuple[float, float]:
        return self._left.requests * _EXTRA, self._left.tokens * _EXTRA

    def _short(self, tokens: int) -> list[Kind]:
        """Of what too little is held for a request of `tokens`."""
        limits, short = self.limits, []
        if limits.requests_per_minute is not None and self.held.requests < 1:
            short.append(Kind.REQUESTS)
        if limits.tokens_per_minute is not None and self.held.tokens < tokens:
            short.append(Kind.TOKENS)
        if limits.concurrency is not None and self.places <= self.running:
            short.append(Kind.PLACES)
        return short

    def _described(self, kind: Kind, tokens: int, *, now_s: float) -> Shortage:
        limits = self.limits
        if kind is Kind.PLACES:
            return Shortage(kind, limits.concurrency or 0, 1, MIN_RETRY_S)
        limit = limits.requests_per_minute if kind is Kind.REQUESTS else limits.tokens_per_minute
        needed = 1 if kind is Kind.REQUESTS else tokens
        assert limit
        missing = max(0.0, needed - self._available(kind, now_s=now_s))
        return Shortage(kind, limit, needed, max(MIN_RETRY_S, missing / limit * MINUTE_S))

    def _available(self, kind: Kind, *, now_s: float) -> float:
        since_s = max(0.0, now_s - self._heard_s)
        if kind is Kind.REQUESTS:
            rate = (self.limits.requests_per_minute or 0) / MINUTE_S
            return self.held.requests + self._left.requests + rate * since_s
        rate = (self.limits.tokens_per_minute or 0) / MINUTE_S
        return self.held.tokens + self._left.tokens + rate * since_s

    def _lacking(self, requests: int, tokens: float) -> Amount:
        limits = self.limits
        return Amount(
            max(0.0, requests - self.held.requests)
            if limits.requests_per_minute is not None
            else 0,
            max(0.0, tokens - self.held.tokens) if limits.tokens_per_minute is not None else 0,
        )

    def _surplus(self, *, now_s: float) -> Amount:
        """What is held beyond what was spent of late."""
        if now_s - self._spent_s >= KEPT_FOR_S:
            return self.held
        late = self._of_late
        return Amount(
            max(0.0, self.held.requests - late.requests), max(0.0, self.held.tokens - late.tokens)
        )

    @property
    def _of_late(self) -> Amount:
        """What was spent in about a second."""
        now, before = self._spent, self._spent_before
        return Amount(max(now.requests, before.requests), max(now.tokens, before.tokens))

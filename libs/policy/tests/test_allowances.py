"""Limits that gateways share: never more than the limit, whoever asks when."""

from random import Random

import pytest

from diptych_contracts.allowances import Allowance, Places
from diptych_contracts.ids import Incarnation
from diptych_contracts.keys import RateLimits
from diptych_policy.allowances import MINUTE_MS, PLACES_TTL_MS, Amount, Grant, Wish, exchange
from diptych_policy.shares import KEPT_FOR_S, RENEW_S, Kind, Share

A, B = Incarnation("gateway-a"), Incarnation("gateway-b")
RATES = RateLimits(requests_per_minute=60, tokens_per_minute=6000)


def asked(
    allowance: Allowance | None,
    limits: RateLimits,
    *,
    at_ms: int = 0,
    gateway: Incarnation = A,
    **wish: object,
) -> tuple[Allowance, Grant]:
    return exchange(allowance, limits, Wish(gateway=gateway, **wish), now_unix_ms=at_ms)  # type: ignore[arg-type]


def test_without_a_record_all_of_a_minute_is_there() -> None:
    made, grant = asked(None, RATES, need=Amount(1, 100))
    assert grant.taken == Amount(1, 100)
    assert (made.requests, made.tokens) == (59, 5900)


def test_a_need_is_met_whole_or_not_at_all_and_more_as_far_as_there_is() -> None:
    start = Allowance(requests=3, tokens=50, at_unix_ms=0)
    made, grant = asked(start, RATES, need=Amount(1, 51), more=Amount(10, 10))
    assert grant.taken == Amount(3, 0)
    assert (made.requests, made.tokens) == (0, 50)


def test_it_refills_evenly_up_to_a_minutes_worth() -> None:
    empty = Allowance(requests=0, tokens=0, at_unix_ms=1000)
    _, after_a_second = asked(empty, RATES, at_ms=2000)
    assert after_a_second.left == Amount(1, 100)
    _, after_an_hour = asked(empty, RATES, at_ms=1000 + 60 * MINUTE_MS)
    assert after_an_hour.left == Amount(60, 6000)


def test_a_clock_that_goes_back_refills_nothing() -> None:
    made, grant = asked(Allowance(requests=5, tokens=5, at_unix_ms=9000), RATES, at_ms=4000)
    assert grant.left == Amount(5, 5)
    assert made.at_unix_ms == 9000


def test_a_lowered_limit_counts_at_once() -> None:
    _, grant = asked(
        Allowance(requests=60, tokens=6000, at_unix_ms=0), RateLimits(requests_per_minute=2)
    )
    assert grant.left == Amount(2, 0)


def test_what_is_brought_back_is_there_for_the_next() -> None:
    left = Allowance(requests=1, tokens=10, at_unix_ms=0)
    made, _ = asked(left, RATES, back=Amount(2, 30))
    assert (made.requests, made.tokens) == (3, 40)


def test_places_are_shared_and_those_of_a_dead_gateway_fall_free() -> None:
    limits = RateLimits(concurrency=4)
    one, first = asked(None, limits, places=3)
    two, second = asked(one, limits, gateway=B, places=3, at_ms=10)
    assert (first.places, second.places, second.free_places) == (3, 1, 0)
    _, later = asked(two, limits, gateway=B, places=3, at_ms=PLACES_TTL_MS + 10)
    assert later.places == 3
    assert two.places[0] == Places(gateway=A, count=3, unix_ms=0)


class World:
    """Gateways that share one record, in turns of any order."""

    def __init__(self, limits: RateLimits, gateways: int) -> None:
        self.limits = limits
        self.now_ms = 0
        self.record: Allowance | None = None
        self.shares = [Share(limits) for _ in range(gateways)]

    @property
    def now_s(self) -> float:
        return self.now_ms / 1000

    def swap(self, number: int, tokens: int | None) -> None:
        share = self.shares[number]
        wish = share.wish(Incarnation(f"g{number}"), tokens=tokens, now_s=self.now_s)
        self.record, grant = exchange(self.record, self.limits, wish, now_unix_ms=self.now_ms)
        share.granted(grant, now_s=self.now_s)

    def take(self, number: int, tokens: int) -> bool:
        share = self.shares[number]
        if share.take(tokens, now_s=self.now_s):
            return True
        share.queue(tokens)
        self.swap(number, tokens)
        share.unqueue(tokens)
        return (
            share.take(tokens, now_s=self.now_s) or share.denied(tokens, now_s=self.now_s) is None
        )


@pytest.mark.parametrize("seed", range(20))
def test_gateways_together_never_give_more_than_the_limit(seed: int) -> None:
    rng = Random(seed)
    world = World(RateLimits(requests_per_minute=120, tokens_per_minute=10_000, concurrency=6), 3)
    running: list[tuple[int, int, int]] = []
    requests = tokens = peak = 0
    for _ in range(4000):
        world.now_ms += rng.randrange(40)
        number, wanted = rng.randrange(3), rng.randrange(1, 200)
        if rng.random() < 0.6 and world.take(number, wanted):
            running.append((number, wanted, rng.randrange(wanted + 1)))
            requests += 1
            peak = max(peak, len(running))
        elif running and rng.random() < 0.7:
            number, wanted, used = running.pop(rng.randrange(len(running)))
            world.shares[number].settle(wanted, used)
            tokens += used
        if rng.random() < 0.05 and world.shares[number].tick(now_s=world.now_s):
            world.swap(number, None)
        for share in world.shares:
            share.check()
    minutes = world.now_ms / MINUTE_MS
    assert peak <= 6
    assert requests <= 120 * (1 + minutes)
    assert tokens <= 10_000 * (1 + minutes)
    assert requests > 100 * minutes


def test_what_a_request_did_not_use_comes_back() -> None:
    world = World(RateLimits(tokens_per_minute=1000), 1)
    assert world.take(0, 1000)
    assert not world.take(0, 1)
    world.shares[0].settle(1000, 10)
    assert world.take(0, 990)


def test_a_request_that_did_not_run_gives_all_of_it_back() -> None:
    world = World(RateLimits(requests_per_minute=1, tokens_per_minute=1000, concurrency=1), 1)
    assert world.take(0, 1000)
    assert not world.take(0, 1)
    world.shares[0].undo(1000)
    assert world.take(0, 1000)


def test_places_that_are_held_are_said_again_before_others_take_them() -> None:
    world = World(RateLimits(concurrency=1), 2)
    assert world.take(0, 1)
    share = world.shares[0]
    assert not share.tick(now_s=world.now_s + RENEW_S - 0.1)
    assert share.tick(now_s=world.now_s + RENEW_S)
    world.now_ms += int(RENEW_S * 1000)
    world.swap(0, None)
    world.now_ms += PLACES_TTL_MS - 1
    assert not world.take(1, 1)


def test_a_crowd_that_waits_is_served_by_one_exchange() -> None:
    world = World(RateLimits(requests_per_minute=100), 1)
    (share,) = world.shares
    for _ in range(50):
        share.queue(1)
    world.swap(0, 1)
    assert [share.take(1, now_s=0) for _ in range(50)] == [True] * 50


def test_what_is_not_used_goes_back_after_a_while() -> None:
    world = World(RateLimits(requests_per_minute=100, concurrency=3), 2)
    share = world.shares[0]
    for _ in range(5):
        share.queue(1)
    world.swap(0, 1)
    assert share.held.requests == 5
    assert share.places == 3
    world.now_ms += int(KEPT_FOR_S * 1000)
    assert share.tick(now_s=world.now_s)
    world.swap(0, None)
    assert share.held == Amount()
    assert share.places == 0
    assert world.record is not None
    assert world.record.requests == 100


def test_a_refusal_says_when_to_come_back_and_counts_for_a_moment() -> None:
    world = World(RateLimits(requests_per_minute=6, tokens_per_minute=600), 1)
    (share,) = world.shares
    for _ in range(6):
        assert world.take(0, 10)
    assert not world.take(0, 10)
    shortage = share.shortage(10, now_s=world.now_s)
    assert shortage is not None
    assert shortage.kind is Kind.REQUESTS
    assert shortage.retry_after_s == pytest.approx(10.0)
    world.now_ms += 1100
    assert share.shortage(10, now_s=world.now_s) is None


def test_more_than_the_limit_is_never_possible() -> None:
    impossible = Share(RateLimits(tokens_per_minute=100)).impossible(101)
    assert impossible is not None
    assert impossible.retry_after_s is None


def test_what_is_told_of_a_limit() -> None:
    world = World(RATES, 1)
    assert world.take(0, 600)
    told = world.shares[0].remaining(Kind.REQUESTS, now_s=0)
    assert told is not None
    assert (told.limit, told.remaining, told.reset_s) == (60, 59, pytest.approx(1.0))
    tokens = world.shares[0].remaining(Kind.TOKENS, now_s=1.0)
    assert tokens is not None
    assert (tokens.limit, tokens.remaining) == (6000, 5500)

from typing import Any

import pytest

from diptych_contracts.blocks import BlocksQuery
from diptych_contracts.control import Scale
from diptych_contracts.ids import Incarnation
from diptych_contracts.orders import Order
from diptych_contracts.power import PowerSetPoint
from diptych_policy.orders import MAX_VALID_MS, SKEW_MS, Obedience, Refusal

ME = "power.decode-worker-1"
NOW_MS = 1_700_000_000_000


def an_order(**changes: Any) -> Order:
    values: dict[str, Any] = {
        "subject": ME,
        "sender": Incarnation("power-governor-1"),
        "role": "power-governor",
        "epoch": 7,
        "sequence": 1,
        "issued_unix_ms": NOW_MS,
        "expires_unix_ms": NOW_MS + 10_000,
        "body": b"",
    }
    return Order(**(values | changes))


@pytest.fixture
def obedience() -> Obedience:
    return Obedience(ME)


def judged(
    obedience: Obedience, unix_ms: int = NOW_MS, kind: Any = PowerSetPoint, **changes: Any
) -> Refusal | None:
    return obedience.judge(an_order(**changes), kind, unix_ms=unix_ms)


def test_orders_in_their_order_are_obeyed(obedience: Obedience) -> None:
    assert [judged(obedience, sequence=n) for n in (1, 2, 5)] == [None, None, None]


def test_a_replayed_one_is_refused_and_so_is_an_older_one(obedience: Obedience) -> None:
    assert judged(obedience, sequence=2) is None
    assert judged(obedience, sequence=2) is Refusal.REPLAYED
    assert judged(obedience, sequence=1) is Refusal.REPLAYED


def test_one_for_another_worker_is_refused(obedience: Obedience) -> None:
    assert judged(obedience, subject="power.decode-worker-2") is Refusal.FOREIGN


@pytest.mark.parametrize("role", ["decode-worker", "scheduler", "operator", ""])
def test_who_has_no_right_to_it_is_refused(obedience: Obedience, role: str) -> None:
    assert judged(obedience, role=role) is Refusal.FORBIDDEN


def test_what_is_no_order_is_none_whoever_says_it(obedience: Obedience) -> None:
    assert judged(obedience, kind=BlocksQuery) is Refusal.FORBIDDEN


def test_a_successor_is_obeyed_and_its_predecessor_no_more(obedience: Obedience) -> None:
    """A governor that was only frozen; a restarted one counts its orders from one again."""
    assert judged(obedience, sequence=90) is None
    assert judged(obedience, sender=Incarnation("power-governor-2"), epoch=9) is None
    assert judged(obedience, sequence=91) is Refusal.OLD_EPOCH


def test_orders_have_their_time(obedience: Obedience) -> None:
    assert judged(obedience, unix_ms=NOW_MS + 10_001 + SKEW_MS) is Refusal.EXPIRED
    assert judged(obedience, unix_ms=NOW_MS - 1 - SKEW_MS) is Refusal.EARLY
    forever = judged(obedience, expires_unix_ms=NOW_MS + MAX_VALID_MS + 1)
    assert forever is Refusal.TOO_LONG
    assert judged(obedience) is None


def test_a_bus_that_lost_its_store_is_obeyed_again_once_all_older_orders_have_expired(
    obedience: Obedience,
) -> None:
    """Its revisions, and so epochs, begin at one."""
    assert judged(obedience, epoch=500) is None
    soon, late = NOW_MS + 30_000, NOW_MS + MAX_VALID_MS + 3 * SKEW_MS
    for unix_ms, refusal in ((soon, Refusal.OLD_EPOCH), (late, None)):
        said = judged(
            obedience,
            epoch=1,
            unix_ms=unix_ms,
            issued_unix_ms=unix_ms,
            expires_unix_ms=unix_ms + 10_000,
        )
        assert said is refusal


def test_where_nobody_leads_each_command_counts_by_itself(obedience: Obedience) -> None:
    operator: dict[str, Any] = {"kind": Scale, "role": "operator", "sender": "operator"}
    assert judged(obedience, epoch=2, **operator) is None
    assert judged(obedience, epoch=1, **operator) is None
    assert judged(obedience, epoch=1, **operator) is Refusal.REPLAYED


def test_what_is_refused_leaves_no_trace(obedience: Obedience) -> None:
    """Else a wrong order could have the right ones refused."""
    assert judged(obedience, epoch=99, role="decode-worker") is Refusal.FORBIDDEN
    assert judged(obedience, epoch=99, subject="power.another") is Refusal.FOREIGN
    assert judged(obedience) is None


def test_what_it_remembers_is_bounded_by_time(obedience: Obedience) -> None:
    for n in range(100):
        at = NOW_MS + n * 10_000
        operator: dict[str, Any] = {"kind": Scale, "role": "operator", "sender": "operator"}
        times = {"issued_unix_ms": at, "expires_unix_ms": at + 1000}
        assert judged(obedience, at, epoch=n, **operator, **times) is None
    assert len(obedience._obeyed) < 10

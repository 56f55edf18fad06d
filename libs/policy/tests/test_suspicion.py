from random import Random

import msgspec
import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import RecordState, RequestRecord, Setback
from diptych_policy.limits import Limits
from diptych_policy.routing import Company
from diptych_policy.suspicion import (
    MAX_SETBACKS,
    cleared,
    company_of,
    given_up,
    struck,
    suspected,
    with_setback,
)
from diptych_testkit.builders import GATEWAY, REQUEST

LIMITS = Limits()


def a_record(*, lost: int = 0, strikes: int = 0) -> RequestRecord:
    return RequestRecord(
        request_id=REQUEST,
        owner=Incarnation("s1"),
        gateway=GATEWAY,
        state=RecordState.ROUTED,
        lost_attempts=lost,
        strikes=strikes,
    )


def after(record: RequestRecord, *, added: int = 0, apart: bool = False) -> tuple[int, int]:
    struck_once = struck(record, LIMITS, added_tokens=added, apart=apart)
    return struck_once.lost_attempts, struck_once.strikes


@pytest.mark.parametrize(
    ("record", "added", "apart", "expected"),
    [
        (a_record(), 0, False, (1, 1)),
        (a_record(lost=2, strikes=2), 0, False, (3, 3)),
        (a_record(lost=3, strikes=3), 0, False, (4, 3)),
        (a_record(lost=3, strikes=3), 0, True, (4, 4)),
        (a_record(lost=4, strikes=4), 0, False, (5, 4)),
        (a_record(lost=4, strikes=4), 0, True, (5, 5)),
        (a_record(lost=2, strikes=2), 7, False, (3, 3)),
        (a_record(lost=2, strikes=2), 8, False, (3, 1)),
        (a_record(lost=4, strikes=1), 8, False, (5, 1)),
        (a_record(lost=6, strikes=1), 8, False, (7, 3)),
        (a_record(lost=7, strikes=3), 100, True, (8, 4)),
    ],
)
def test_a_lost_attempt_is_a_strike(
    record: RequestRecord, added: int, apart: bool, expected: tuple[int, int]
) -> None:
    assert after(record, added=added, apart=apart) == expected


def test_three_strikes_make_a_suspect_and_five_end_it() -> None:
    assert not suspected(a_record(lost=2, strikes=2), LIMITS)
    assert suspected(a_record(lost=3, strikes=3), LIMITS)
    assert not given_up(a_record(lost=4, strikes=4), LIMITS)
    assert given_up(a_record(lost=5, strikes=5), LIMITS)
    assert not given_up(a_record(lost=9, strikes=3), LIMITS)
    assert given_up(a_record(lost=10, strikes=3), LIMITS)


def test_a_suspect_is_cleared_by_a_few_tokens_while_it_has_credit() -> None:
    assert not cleared(a_record(lost=3, strikes=3), LIMITS, added_tokens=7)
    assert cleared(a_record(lost=3, strikes=3), LIMITS, added_tokens=8)
    assert not cleared(a_record(lost=2, strikes=2), LIMITS, added_tokens=8)
    assert not cleared(a_record(lost=7, strikes=3), LIMITS, added_tokens=1000)


def test_a_suspect_gets_company_only_after_a_while() -> None:
    record = a_record(lost=3, strikes=3)
    waits = {0.0: Company.NONE, 3.0: Company.PROVEN, 19.9: Company.PROVEN, 20.0: Company.ANY}
    for waited_s, company in waits.items():
        assert company_of(record, LIMITS, waited_s=waited_s) is company
    assert company_of(a_record(lost=9, strikes=2), LIMITS, waited_s=0.0) is Company.ANY


def test_only_the_last_setbacks_are_remembered() -> None:
    record = a_record()
    for attempt in range(1, 31):
        record = with_setback(record, Setback(attempt=attempt, why="gone"))
    assert [s.attempt for s in record.setbacks] == list(range(31 - MAX_SETBACKS, 31))


@pytest.mark.parametrize("seed", range(50))
def test_whatever_happens_ten_lost_attempts_are_the_most(seed: int) -> None:
    """One that runs for hours through many unrelated deaths is no exception."""
    rng = Random(seed)
    record, lost = a_record(), 0
    while not given_up(record, LIMITS):
        added = rng.choice((0, 3, 8, 500))
        apart = suspected(record, LIMITS) and rng.random() < 0.5
        if cleared(record, LIMITS, added_tokens=added):
            record = msgspec.structs.replace(record, strikes=0)
        record = struck(record, LIMITS, added_tokens=added, apart=apart)
        lost += 1
        assert record.strikes <= LIMITS.max_lost_attempts
    assert 5 <= lost <= 10

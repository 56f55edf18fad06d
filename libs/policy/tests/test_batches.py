from typing import Any

import pytest

from diptych_contracts.batches import BatchRecord, BatchState
from diptych_contracts.ids import Incarnation
from diptych_policy.batches import (
    MAX_TRIES,
    MODEL_WAIT_S,
    Absences,
    Outcome,
    next_to_run,
    outcome,
    wait_s,
)

ME = Incarnation("gateway-1")


def a_batch(batch_id: str, **changes: Any) -> BatchRecord:
    values: dict[str, Any] = {
        "batch_id": batch_id,
        "tenant": "t",
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-1",
        "created_unix_ms": 0,
        "expires_unix_ms": 10**6,
    }
    return BatchRecord(**(values | changes))


def chosen(*records: BatchRecord, running: tuple[str, ...] = (), at_once: int = 4) -> str | None:
    found = next_to_run(records, running, at_once=at_once, now_unix_ms=1_000)
    return None if found is None else found.batch_id


def test_the_oldest_batch_that_nobody_owns_is_next() -> None:
    old = a_batch("old", created_unix_ms=1)
    assert chosen(a_batch("new", created_unix_ms=2), old) == "old"
    assert chosen() is None


def test_an_owner_that_does_not_renew_owns_nothing() -> None:
    assert chosen(a_batch("b", owner=ME, owned_until_unix_ms=1_001)) is None
    assert chosen(a_batch("b", owner=ME, owned_until_unix_ms=1_000)) == "b"


@pytest.mark.parametrize("state", BatchState)
def test_what_is_over_is_left_alone(state: BatchState) -> None:
    assert chosen(a_batch("b", state=state)) == (None if state.is_over else "b")


def test_tenants_take_turns() -> None:
    busy = a_batch("running", owner=ME, owned_until_unix_ms=2_000)
    waiting = a_batch("waiting", created_unix_ms=1)
    other = a_batch("other", tenant="u", created_unix_ms=9)
    assert chosen(busy, waiting, other) == "other"
    assert chosen(busy, waiting) == "waiting"


def test_no_more_run_here_than_may() -> None:
    assert chosen(a_batch("b"), running=("x",), at_once=1) is None
    assert chosen(a_batch("b"), running=("b",), at_once=2) is None


@pytest.mark.parametrize(
    ("status", "code", "found"),
    [
        (200, None, Outcome.GOOD),
        (400, "invalid_value", Outcome.BAD),
        (401, None, Outcome.BAD),
        (408, None, Outcome.AGAIN),
        (409, "previous_response_in_progress", Outcome.BAD),
        (429, "rate_limit_exceeded", Outcome.AGAIN),
        (503, "draining", Outcome.AGAIN),
        (500, "failed", Outcome.AGAIN),
        (504, "expired", Outcome.AGAIN),
    ],
)
def test_a_line_is_repeated_for_what_is_not_its_own_fault(
    status: int, code: str | None, found: Outcome
) -> None:
    assert outcome(status, code, tries=1, waited_s=0) is found


def test_a_failure_is_repeated_some_times_a_refusal_always() -> None:
    assert outcome(500, None, tries=MAX_TRIES - 1, waited_s=0) is Outcome.AGAIN
    assert outcome(500, None, tries=MAX_TRIES, waited_s=0) is Outcome.BAD
    assert outcome(503, None, tries=MAX_TRIES, waited_s=10**6) is Outcome.AGAIN


def test_a_line_that_alone_is_too_much_is_not_repeated() -> None:
    assert outcome(429, None, tries=0, waited_s=0, hopeless=True) is Outcome.BAD
    assert outcome(503, None, tries=0, waited_s=0, hopeless=True) is Outcome.AGAIN


def test_a_model_that_is_gone_may_come_back_for_a_while() -> None:
    assert outcome(404, "model_not_found", tries=0, waited_s=1) is Outcome.AGAIN
    assert outcome(404, "model_not_found", tries=0, waited_s=MODEL_WAIT_S) is Outcome.BAD
    assert outcome(404, "not_found", tries=0, waited_s=1) is Outcome.BAD


def test_waits_grow_and_obey_the_refusal() -> None:
    waits = [wait_s(tries) for tries in range(1, 20)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.5, 15.0)
    assert wait_s(1, 30.0) == 30.0


def test_a_model_is_waited_for_once_and_not_by_each_line() -> None:
    absences = Absences()
    assert absences.away_s("typo", now_s=10.0) == 0.0
    assert absences.away_s("typo", now_s=10.0 + MODEL_WAIT_S) == MODEL_WAIT_S
    assert absences.away_s("other", now_s=200.0) == 0.0


def test_a_model_that_was_back_is_waited_for_again() -> None:
    absences = Absences()
    absences.away_s("m", now_s=0.0)
    absences.there("m")
    assert absences.away_s("m", now_s=500.0) == 0.0


def test_many_wrong_names_are_waited_for_as_if_they_were_one() -> None:
    absences = Absences()
    waits = [absences.away_s(f"typo {n}", now_s=float(n)) for n in range(100)]
    assert max(waits) == 100 - 1 - 17
    assert waits.count(0.0) == 18

from typing import Any

import pytest

from diptych_contracts.idempotency import Claim, ClaimState, claim_key
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_policy.claims import Step, next_step
from diptych_testkit.builders import GATEWAY, REQUEST, an_end


def a_claim(state: ClaimState = ClaimState.CLAIMED, **changes: Any) -> Claim:
    values: dict[str, Any] = {
        "digest": "d",
        "request_id": REQUEST,
        "gateway": GATEWAY,
        "journal_seq": 0,
        "created_unix_ms": 0,
        "deadline_unix_ms": 9_000,
        "give_up_unix_ms": 1_000,
        "state": state,
    }
    return Claim(**(values | changes))


def a_record(state: RecordState, end: EndReason | None = None) -> RequestRecord:
    return RequestRecord(
        request_id=RequestId("r1"),
        owner=Incarnation("scheduler-1"),
        gateway=GATEWAY,
        state=state,
        end=None if end is None else an_end(end),
    )


def step(claim: Claim | None, record: RequestRecord | None = None, now_unix_ms: int = 0) -> Step:
    return next_step(claim, record, digest="d", now_unix_ms=now_unix_ms)


def test_a_key_that_nobody_used_or_that_is_free_again_runs() -> None:
    assert step(None) is Step.RUN
    assert step(a_claim(ClaimState.FREE, digest="another")) is Step.RUN


@pytest.mark.parametrize("state", [ClaimState.CLAIMED, ClaimState.STORED, ClaimState.ENDED])
def test_another_body_is_told_apart(state: ClaimState) -> None:
    assert step(a_claim(state, digest="another")) is Step.DIFFERENT


def test_what_has_ended_is_said_again() -> None:
    assert step(a_claim(ClaimState.ENDED)) is Step.REPLAY


@pytest.mark.parametrize("state", [ClaimState.CLAIMED, ClaimState.STORED])
def test_a_request_with_a_record_is_joined_unless_it_came_to_nothing(state: ClaimState) -> None:
    claim = a_claim(state)
    assert step(claim, a_record(RecordState.QUEUED)) is Step.JOIN
    assert step(claim, a_record(RecordState.ROUTED)) is Step.JOIN
    assert step(claim, a_record(RecordState.CLOSED, EndReason.LENGTH)) is Step.JOIN
    assert step(claim, a_record(RecordState.CANCELLING)) is Step.RUN
    assert step(claim, a_record(RecordState.ENDING, EndReason.EXPIRED)) is Step.RUN
    assert step(claim, a_record(RecordState.CLOSED, EndReason.CANCELLED)) is Step.RUN
    assert step(claim, a_record(RecordState.CLOSED, EndReason.FAILED)) is Step.RUN


def test_without_a_record_a_stored_one_is_joined_and_a_claimed_one_withdrawn_in_time() -> None:
    assert step(a_claim(ClaimState.STORED), now_unix_ms=10**9) is Step.JOIN
    assert step(a_claim(), now_unix_ms=999) is Step.WAIT
    assert step(a_claim(), now_unix_ms=1_000) is Step.WITHDRAW


def test_entries_of_two_tenants_or_endpoints_differ() -> None:
    names = {claim_key(t, e, k) for t in "ab" for e in ("/x", "/y") for k in "12"}
    assert len(names) == 8

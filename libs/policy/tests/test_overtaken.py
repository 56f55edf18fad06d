import pytest

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import Assignment, Mode, RecordState, RequestRecord
from diptych_policy.overtaken import FIRST_LOOK_S, NEXT_LOOK_S, Rounds, overtaken
from diptych_testkit.builders import GATEWAY, REQUEST

D1, D2 = Incarnation("d1"), Incarnation("d2")
A, B = (RequestId("a"), 1), (RequestId("b"), 1)


def record(state: RecordState = RecordState.ROUTED, *, attempt: int = 2) -> RequestRecord:
    return RequestRecord(
        request_id=REQUEST,
        owner=Incarnation("s1"),
        gateway=GATEWAY,
        state=state,
        attempt=attempt,
        assignment=Assignment(mode=Mode.LOCAL, decode=D1) if state is RecordState.ROUTED else None,
    )


def test_the_attempt_that_counts_goes_on() -> None:
    assert not overtaken(record(), 2, D1)
    assert not overtaken(record(attempt=1), 2, D1)  # it was read a moment too early
    assert not overtaken(record(RecordState.QUEUED), 2, D1)


@pytest.mark.parametrize("state", [RecordState.CANCELLING, RecordState.ENDING, RecordState.CLOSED])
def test_what_ends_is_not_worked_on(state: RecordState) -> None:
    assert overtaken(record(state), 2, D1)


def test_an_older_attempt_and_another_workers_are_in_vain() -> None:
    assert overtaken(record(), 1, D1)
    assert overtaken(record(), 2, D2)


def test_each_attempt_has_its_turns() -> None:
    rounds = Rounds()
    assert rounds.due([A], now_s=10.0) == []
    assert rounds.due([A, B], now_s=10.0 + FIRST_LOOK_S) == [A]
    assert rounds.due([A, B], now_s=10.0 + 2 * FIRST_LOOK_S) == [B]
    assert rounds.due([A, B], now_s=10.0 + FIRST_LOOK_S + NEXT_LOOK_S) == [A]


def test_after_a_freeze_everything_is_looked_up_at_once() -> None:
    rounds = Rounds()
    rounds.due([A, B], now_s=0.0)
    assert rounds.due([A, B], now_s=100.0) == [A, B]


def test_what_has_left_is_forgotten() -> None:
    rounds = Rounds()
    rounds.due([A], now_s=0.0)
    rounds.due([], now_s=1.0)
    assert rounds.due([A], now_s=50.0) == []

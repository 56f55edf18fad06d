import msgspec
import pytest

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_policy.merging import overrules, surplus, taken_on, unowned

MINE, OTHER = Incarnation("s1-1"), Incarnation("s2-1")


def record(state: RecordState, owner: Incarnation = MINE) -> RequestRecord:
    return RequestRecord(
        request_id=RequestId("r1"), owner=owner, gateway=Incarnation("g1-1"), state=state
    )


@pytest.mark.parametrize("wanted", [RecordState.ENDING, RecordState.CLOSED])
@pytest.mark.parametrize("mark", [RecordState.CANCELLING, RecordState.ENDING])
def test_an_end_overrules_a_gateways_mark(wanted: RecordState, mark: RecordState) -> None:
    assert overrules(record(wanted), record(mark))


@pytest.mark.parametrize("wanted", [RecordState.QUEUED, RecordState.ROUTED])
def test_work_gives_way_to_a_mark(wanted: RecordState) -> None:
    assert not overrules(record(wanted), record(RecordState.CANCELLING))


def test_another_owner_decides_for_itself() -> None:
    seen = record(RecordState.ROUTED, owner=OTHER)
    assert not overrules(record(RecordState.CLOSED), seen)


def test_a_closed_record_stays_as_it_is() -> None:
    closed = record(RecordState.CLOSED)
    assert not overrules(msgspec.structs.replace(closed, attempt=2), closed)


MARK = RequestRecord(
    request_id=RequestId("r1"),
    owner=Incarnation("g1-1"),
    gateway=Incarnation("g1-1"),
    state=RecordState.CANCELLING,
    cancel_reason="the client left",
)


def numbered(state: RecordState, request_seq: int) -> RequestRecord:
    return msgspec.structs.replace(record(state), request_seq=request_seq)


def test_only_a_gateways_mark_is_unowned() -> None:
    assert unowned(MARK)
    assert not unowned(numbered(RecordState.CANCELLING, 7))
    assert not unowned(numbered(RecordState.CLOSED, 0))


def test_a_mark_is_taken_on_with_its_reason() -> None:
    taken = taken_on(numbered(RecordState.QUEUED, 7), MARK)
    assert (taken.owner, taken.request_seq) == (MINE, 7)
    assert (taken.state, taken.cancel_reason) == (RecordState.CANCELLING, "the client left")


def test_what_has_ended_already_is_not_cancelled() -> None:
    unreadable = numbered(RecordState.ENDING, 7)
    assert taken_on(unreadable, MARK) is unreadable


@pytest.mark.parametrize(
    ("standing", "expected"),
    [
        (numbered(RecordState.CLOSED, 7), True),
        (numbered(RecordState.CLOSED, 6), True),
        (numbered(RecordState.ROUTED, 6), True),
        (numbered(RecordState.ROUTED, 7), False),
        (MARK, False),
    ],
)
def test_a_message_that_nobody_reads_is_surplus(standing: RequestRecord, expected: bool) -> None:
    assert surplus(7, standing) is expected

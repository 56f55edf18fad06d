import msgspec
import pytest

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_policy.merging import overrules

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

import msgspec
import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import End, EndReason, Fence
from diptych_contracts.requests import Assignment, Mode, RecordState, RequestRecord
from diptych_policy.attendance import Attendance
from diptych_policy.deadlines import (
    EndUnheard,
    Expire,
    FenceUnheard,
    GiveUpAttempt,
    Unread,
    overdue,
)
from diptych_policy.journal import RequestView
from diptych_policy.live_request import LiveRequest, Stage
from diptych_testkit.builders import GATEWAY, REQUEST, a_request, tokens

D1 = Incarnation("d1")
LOCAL = Assignment(mode=Mode.LOCAL, decode=D1)


def a_live_request(stage: Stage, **changes: object) -> LiveRequest:
    record = RequestRecord(
        request_id=REQUEST,
        owner=Incarnation("s1"),
        gateway=GATEWAY,
        state=RecordState.ROUTED,
        assignment=LOCAL if stage is Stage.ROUTED else None,
        deadline_unix_ms=1_000_000,
    )
    live = LiveRequest(
        request=a_request(),
        record=msgspec.structs.replace(record, **changes),
        view=RequestView(REQUEST),
        arrival=1,
        stage=stage,
        since_s=0.0,
        arrived_s=0.0,
        progress_s=0.0,
        attendance=Attendance(grace_s=0.0),
    )
    assert list(live.broken_invariants()) == []
    return live


def broken(live: LiveRequest) -> str:
    (what,) = live.broken_invariants()
    return what


def test_each_broken_invariant_is_named() -> None:
    live = a_live_request(Stage.ROUTED)
    live.record = msgspec.structs.replace(live.record, assignment=None)
    assert broken(live) == "a routed request has workers"
    live = a_live_request(Stage.QUEUED)
    live.record = msgspec.structs.replace(live.record, assignment=LOCAL)
    assert broken(live) == "a queued request has no workers"
    live = a_live_request(Stage.QUEUED)
    live.booked[D1] = 5
    assert broken(live) == "only routed requests are booked"
    live = a_live_request(Stage.QUEUED)
    live.view.end = End(request_id=REQUEST, attempt=1, reason=EndReason.STOP)
    assert broken(live) == "an ended request is gone"
    live = a_live_request(Stage.QUEUED)
    live.view.apply(Fence(request_id=REQUEST, attempt=2))
    assert broken(live) == "the journal is never ahead of the record"


def test_nobody_is_needed_without_an_assignment() -> None:
    assert not a_live_request(Stage.QUEUED).needs(D1)
    assert a_live_request(Stage.ROUTED).needs(D1)
    assert not a_live_request(Stage.ROUTED).needs(Incarnation("x"))


@pytest.mark.parametrize(
    ("stage", "now_s", "expected"),
    [
        (Stage.CREATING, 999.0, None),
        (Stage.ENDING, 1.0, None),
        (Stage.ENDING, 2.0, EndUnheard()),
        (Stage.QUEUED, 59.0, None),
        (Stage.QUEUED, 60.0, Expire("no first token within 60 s: no token came")),
    ],
)
def test_what_is_overdue_before_the_first_token(
    stage: Stage, now_s: float, expected: object
) -> None:
    live = a_live_request(stage)
    assert overdue(live, now_s=now_s, unix_ms=0, end_again_s=2.0) == expected


def test_what_is_overdue_between_tokens() -> None:
    live = a_live_request(Stage.ROUTED)
    live.view.apply(tokens(1))
    assert overdue(live, now_s=4.9, unix_ms=0, end_again_s=2.0) is None
    late = overdue(live, now_s=5.0, unix_ms=0, end_again_s=2.0)
    assert late == GiveUpAttempt("no token for 5 s")
    live.view.apply(Fence(request_id=REQUEST, attempt=2))
    live.record = msgspec.structs.replace(live.record, attempt=2)
    assert overdue(live, now_s=59.0, unix_ms=0, end_again_s=2.0) is None
    late = overdue(live, now_s=60.0, unix_ms=0, end_again_s=2.0)
    assert late == GiveUpAttempt("no token within 60 s of the new attempt")
    live.to(Stage.FENCING, now_s=60.0)
    assert overdue(live, now_s=61.9, unix_ms=0, end_again_s=2.0) is None
    assert overdue(live, now_s=62.0, unix_ms=0, end_again_s=2.0) == FenceUnheard()


def test_the_total_deadline_comes_first() -> None:
    live = a_live_request(Stage.QUEUED)
    assert overdue(live, now_s=0, unix_ms=1_000_000, end_again_s=2.0) == Expire(
        "the total deadline passed"
    )


def test_an_orphan_is_overdue_once_its_grace_is_over() -> None:
    live = a_live_request(Stage.QUEUED)
    live.attendance.grace_s = 30.0
    live.attendance.unread(now_s=10.0)
    assert overdue(live, now_s=39.9, unix_ms=0, end_again_s=2.0) is None
    assert overdue(live, now_s=40.0, unix_ms=0, end_again_s=2.0) == Unread()
    live.to(Stage.ENDING, now_s=40.0)
    assert overdue(live, now_s=41.0, unix_ms=0, end_again_s=2.0) is None

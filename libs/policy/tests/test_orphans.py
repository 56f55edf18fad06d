from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_policy.orphans import Found, OrphanedPrompts, unneeded_prompt
from diptych_testkit.builders import GATEWAY, REQUEST, a_request, an_end, by_reference


def record(state: RecordState, reason: EndReason | None = None) -> RequestRecord:
    end = None if reason is None else an_end(reason)
    return RequestRecord(request_id=REQUEST, owner=GATEWAY, gateway=GATEWAY, state=state, end=end)


def test_a_prompt_whose_record_is_closed_is_an_orphan_at_once() -> None:
    done = record(RecordState.CLOSED, EndReason.STOP)
    found = [Found("a", done), Found("b", record(RecordState.ROUTED))]
    assert OrphanedPrompts().look(found, newest_seq=9, done_seq=9) == ["a"]


def test_that_of_a_failed_request_stays_as_long_as_its_record() -> None:
    orphans, failed = OrphanedPrompts(), record(RecordState.CLOSED, EndReason.FAILED)
    request, _ = by_reference(a_request())
    assert unneeded_prompt(request, an_end(EndReason.FAILED)) == ""
    assert unneeded_prompt(request, an_end(EndReason.EXPIRED)) == REQUEST
    assert unneeded_prompt(a_request(), an_end()) == ""
    assert orphans.look([Found("a", failed)], newest_seq=9, done_seq=9) == []
    for _ in range(2):
        assert orphans.look([Found("a", None)], newest_seq=9, done_seq=9) == []
    assert orphans.look([Found("a", None)], newest_seq=9, done_seq=9) == ["a"]


def test_one_without_a_record_must_be_missed_by_schedulers_that_have_caught_up() -> None:
    orphans, alone = OrphanedPrompts(), [Found("a", None)]
    assert orphans.look(alone, newest_seq=5, done_seq=5) == [], "its request may be on its way"
    assert orphans.look(alone, newest_seq=7, done_seq=5) == [], "it would be 6 or 7 at most"
    assert orphans.look(alone, newest_seq=12, done_seq=6) == []
    assert orphans.look(alone, newest_seq=20, done_seq=7) == ["a"]


def test_one_that_waits_in_a_long_queue_is_kept() -> None:
    orphans = OrphanedPrompts()
    for _ in range(60):
        assert orphans.look([Found("a", None)], newest_seq=2000, done_seq=900) == []
    assert (
        orphans.look([Found("a", record(RecordState.QUEUED))], newest_seq=2001, done_seq=2000) == []
    )


def test_what_is_gone_or_has_got_a_record_is_forgotten() -> None:
    orphans = OrphanedPrompts()
    for seen in (None, record(RecordState.ROUTED), None):
        assert orphans.look([Found("a", seen)], newest_seq=1, done_seq=1) == []
    orphans.look([], newest_seq=1, done_seq=1)
    assert orphans.look([Found("a", None)], newest_seq=1, done_seq=1) == []

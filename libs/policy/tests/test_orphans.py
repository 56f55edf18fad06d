from diptych_contracts.requests import RecordState
from diptych_policy.orphans import Found, OrphanedPrompts


def test_a_prompt_whose_record_is_closed_is_an_orphan_at_once() -> None:
    found = [Found("a", RecordState.CLOSED), Found("b", RecordState.ROUTED)]
    assert OrphanedPrompts().look(found, newest_seq=9, done_seq=9) == ["a"]


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
    assert orphans.look([Found("a", RecordState.QUEUED)], newest_seq=2001, done_seq=2000) == []


def test_what_is_gone_or_has_got_a_record_is_forgotten() -> None:
    orphans = OrphanedPrompts()
    for record in (None, RecordState.ROUTED, None):
        assert orphans.look([Found("a", record)], newest_seq=1, done_seq=1) == []
    orphans.look([], newest_seq=1, done_seq=1)
    assert orphans.look([Found("a", None)], newest_seq=1, done_seq=1) == []

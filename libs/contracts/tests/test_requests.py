import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Assignment, Mode

PREFILL, DECODE = Incarnation("prefill-worker-1"), Incarnation("decode-worker-1")


def test_a_remote_attempt_enters_at_the_prefill_worker() -> None:
    assignment = Assignment(mode=Mode.REMOTE, prefill=PREFILL, decode=DECODE)
    assert assignment.entry == PREFILL
    assert assignment.workers == (PREFILL, DECODE)


def test_a_local_attempt_has_one_worker() -> None:
    assignment = Assignment(mode=Mode.LOCAL, decode=DECODE)
    assert assignment.entry == DECODE
    assert assignment.workers == (DECODE,)


@pytest.mark.parametrize("reason", list(EndReason))
def test_only_stop_and_length_are_finishes(reason: EndReason) -> None:
    assert reason.is_finish == (reason in {EndReason.STOP, EndReason.LENGTH})

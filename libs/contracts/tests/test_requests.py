import pytest

from diptych_contracts.errors import Permanent
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Assignment, Mode
from diptych_contracts.sampling import Stopping
from diptych_contracts.wire import decode, encode

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


@pytest.mark.parametrize("max_tokens", [-(2**31), 0, 2**31, 2**62])
def test_an_answer_of_impossible_length_does_not_decode(max_tokens: int) -> None:
    with pytest.raises(Permanent, match="max_tokens"):
        decode(encode(Stopping(max_tokens=max_tokens)), Stopping)

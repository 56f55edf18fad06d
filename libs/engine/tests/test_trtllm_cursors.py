"""What is new: in outputs that grow (the LLM API), and in parts that are counted (trtllm-serve)."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import Refused, Unverified
from diptych_contracts.journal import EndReason
from diptych_engine.port import Phase, SequenceWork
from diptych_engine.request_port import TokenDelta
from diptych_engine.tensorrt_llm.cursors import Cursor
from diptych_engine.tensorrt_llm.serve_cursor import PartCursor
from diptych_engine.tensorrt_llm.serve_wire import read
from diptych_testkit.fake_engines.works import a_work

EOS = 2
Step = tuple[tuple[int, ...], str | None]
STEPS: tuple[Step, ...] = (((5,), None), ((6, 7, 8), None), ((9, 10), "length"))


def _outputs(work: SequenceWork, steps: Sequence[Step]) -> list[TokenDelta]:
    cursor, ids = Cursor(work, (EOS,), drafts=True), list[int]()
    told = []
    for new, reason in steps:
        ids += new
        told.append(cursor.take(SimpleNamespace(token_ids=ids, finish_reason=reason)))
    return told


def part(new: Sequence[int], count: int, reason: str | None = None) -> Any:
    choice = {"token_ids": list(new), "finish_reason": reason}
    usage = {"completion_tokens": count}
    return read(msgspec.json.encode({"choices": [choice], "usage": usage}))


def _parts(work: SequenceWork, steps: Sequence[Step]) -> list[TokenDelta]:
    cursor, count, told = PartCursor(work, (EOS,)), 0, []
    for new, reason in steps:
        count += len(new)
        told.append(cursor.take(part(new, count, reason)))
    return told


Told = Callable[[SequenceWork, Sequence[Step]], list[TokenDelta]]
both = pytest.mark.parametrize("told_of", [_outputs, _parts], ids=["llm_api", "over_http"])


def handed_over() -> SequenceWork:
    offer: Any = object()
    return a_work(Phase.DECODE, answer_ids=(5,), hand_off=offer)


@both
def test_tokens_come_once_however_many_a_step_has(told_of: Told) -> None:
    deltas = told_of(a_work(), STEPS)
    assert [delta.token_ids for delta in deltas] == [(5,), (6, 7, 8), (9, 10)]
    assert [delta.finish for delta in deltas] == [None, None, EndReason.LENGTH]


@both
def test_prefills_token_is_not_told_again(told_of: Told) -> None:
    deltas = told_of(handed_over(), STEPS)
    assert [delta.token_ids for delta in deltas] == [(), (6, 7, 8), (9, 10)]


@both
def test_an_answer_that_goes_on_from_another_token_is_none(told_of: Told) -> None:
    with pytest.raises(Unverified, match="does not begin with prefill's token"):
        told_of(handed_over(), [((6,), None)])


@both
@pytest.mark.parametrize("reason", ["cancelled", "timeout", "error", ""])
def test_an_answer_the_engine_gave_up_is_no_end(told_of: Told, reason: str) -> None:
    with pytest.raises(Refused, match="ended the answer with"):
        told_of(a_work(), [((5,), None), ((6,), reason)])


@both
def test_the_end_of_text_is_no_token_of_the_answer(told_of: Told) -> None:
    assert told_of(a_work(), [((5, EOS), "stop")])[0].token_ids == (5,)


def test_tokens_that_are_missing_are_seen() -> None:
    cursor = PartCursor(a_work(), ())
    cursor.take(part([5], 1))
    with pytest.raises(Refused, match="tokens 1 to 2 of the answer are missing"):
        cursor.take(part([7], 3))


def test_more_than_one_token_of_a_step_was_drafted() -> None:
    assert [delta.accepted_drafts for delta in _outputs(a_work(), STEPS)] == [0, 2, 1]

"""What SGLang says that is no answer, and which tokens of an event are new."""

from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_contracts.journal import EndReason
from diptych_engine.sglang.answers import Answer, Cursor, read_answer


def event(ids: list[int], count: int, finish: Any = None) -> Answer:
    meta = {"completion_tokens": count, "finish_reason": finish}
    return read_answer(msgspec.json.encode({"output_ids": ids, "meta_info": meta}))


@pytest.mark.parametrize(
    ("status", "error"), [(None, Refused), (400, Permanent), (503, Refused), (500, EngineGone)]
)
def test_an_abort_is_sorted_by_its_status(status: int | None, error: type[DiptychError]) -> None:
    """It comes with status 200, as the reason to finish."""
    with pytest.raises(error, match="it broke"):
        event([], 0, {"type": "abort", "message": "it broke", "status_code": status})


def test_an_event_may_have_nothing_new() -> None:
    cursor = Cursor((2,), ignore_eos=False, logprobs=False)
    told = [cursor.delta(event([5], 1)), cursor.delta(event([5], 1))]
    told.append(cursor.delta(event([5], 1, {"type": "length"})))
    assert told[0] is not None
    assert told[0].token_ids == (5,)
    assert told[1] is None
    assert told[2] is not None
    assert (told[2].token_ids, told[2].finish) == ((), EndReason.LENGTH)


def test_tokens_that_are_missing_are_seen() -> None:
    cursor = Cursor((2,), ignore_eos=False, logprobs=False)
    cursor.delta(event([5], 1))
    with pytest.raises(EngineGone, match="says 2 tokens are new and gives 1"):
        cursor.delta(event([7], 3))
    with pytest.raises(EngineGone, match="says -1 tokens are new"):
        cursor.delta(event([5], 0))

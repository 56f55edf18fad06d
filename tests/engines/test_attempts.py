"""Attempts at one request are apart, whoever made the engine."""

from dataclasses import replace

import pytest

from diptych_contracts.sampling import Stopping
from diptych_engine.port import NewTokens, SequenceAborted
from diptych_testkit.engine_pairs import Duo, EngineEntry

pytestmark = [pytest.mark.timeout(300)]
N_TOKENS = 100


def test_an_abort_of_one_attempt_leaves_the_others(duo: Duo, entry: EngineEntry) -> None:
    """They share the request's id, and the name of the first may begin that of the tenth."""
    if not entry.can.grows_slowly:
        pytest.skip("its answers end before they can be aborted")
    prompt, room = tuple(range(5, 25)), duo.decode.engine.spec.context_tokens - 20
    job = duo.work(prompt, stopping=Stopping(max_tokens=room, ignore_eos=True))
    attempts = [job.key._replace(attempt=n) for n in (2, 10, 11)]
    stopping = Stopping(max_tokens=min(N_TOKENS, room), ignore_eos=True)
    others = [replace(job, key=key, stopping=stopping) for key in attempts]
    for each in (job, *others):
        duo.decode.engine.submit(each)
    duo.decode.first(job.key, NewTokens)
    duo.decode.engine.abort(job.key)
    duo.decode.first(job.key, SequenceAborted)
    answers = [duo.decode.tokens(other) for other in others]
    assert [len(answer) for answer in answers] == [stopping.max_tokens] * len(others)
    if entry.can.stays_greedy:
        assert answers == [answers[0]] * len(others)
    duo.is_empty()

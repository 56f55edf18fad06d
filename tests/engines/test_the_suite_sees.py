"""The suite is worth something: an engine that does wrong does not pass it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from diptych_contracts.sampling import Stopping
from diptych_testkit import engine_pairs
from diptych_testkit.engine_entries.toy import settings, toy_pair
from diptych_testkit.engine_pairs import Duo
from diptych_testkit.toy_engine import toy_answer
from diptych_testkit.toy_request_engine import Faults

PROMPT = tuple(range(5, 75))
FAULTS = {
    "a token twice": Faults(repeats=7),
    "a token missing": Faults(skips=7),
    "cumulative deltas": Faults(cumulative=True),
    "no reason for the end": Faults(breaks_off_after=9),
    "an end too early": Faults(too_short=True),
    "refused": Faults(refuses=True),
    "dead on its way": Faults(dies_after=5),
}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("way", ["ask", "hand_over"])
def test_a_wrong_engine_fails(fault: str, way: str) -> None:
    with toy_pair(settings(), replace(FAULTS[fault])) as pair:
        duo = Duo(pair)
        job = duo.work(PROMPT, stopping=Stopping(max_tokens=24, ignore_eos=True))
        expected = toy_answer(PROMPT, 24, vocab_size=260)
        ask: Callable[..., list[int]] = getattr(duo, way)
        with pytest.raises(AssertionError):
            assert ask(job) == expected


def test_what_is_held_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pairs, "WAIT_S", 0.2)
    with toy_pair(settings(), Faults(hangs_after=3)) as pair:
        duo = Duo(pair)
        job = duo.work(PROMPT, stopping=Stopping(max_tokens=24, ignore_eos=True))
        duo.decode.engine.submit(job)
        with pytest.raises(AssertionError, match="held after the end"):
            duo.is_empty()

"""Logprobs as an engine's listener hears them."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from diptych_contracts.ids import RequestId
from diptych_contracts.journal import Chances
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    NewTokens,
    Phase,
    SequenceFailed,
    SequenceKey,
    SequenceWork,
    StepNews,
    StepReport,
)
from diptych_engine.sim import History
from diptych_engine.step_loop import StepLoop
from diptych_testkit.small_fleet import NoStops
from diptych_testkit.toy_engine import ToyStepEngine, toy_logits

WORK = SequenceWork(
    key=SequenceKey(RequestId("r"), 1),
    phase=Phase.GENERATE,
    prompt_ids=(5, 6, 7),
    answer_ids=(),
    sampling=Sampling(temperature=1.5, seed=4, presence_penalty=1.0, top_logprobs=3),
    stopping=Stopping(max_tokens=12),
)


def run(work: SequenceWork) -> list[StepNews]:
    heard: list[StepNews] = []
    done = threading.Event()

    def hear(report: StepReport) -> None:
        heard.extend(report.news)
        if any(isinstance(n, SequenceFailed) or getattr(n, "finish", None) for n in report.news):
            done.set()

    loop = StepLoop(ToyStepEngine(), lambda _stopping: NoStops())
    loop.start(hear)
    loop.submit(work)
    assert done.wait(60)
    loop.stop()
    return heard


def told(news: list[StepNews]) -> tuple[list[int], list[Chances]]:
    new = [n for n in news if isinstance(n, NewTokens)]
    return [t for n in new for t in n.token_ids], [c for n in new for c in n.logprobs]


def test_each_token_comes_with_the_log_softmax_of_the_models_own_logits() -> None:
    ids, logprobs = told(run(WORK))
    row = np.empty(1000, np.float32)
    assert len(ids) == len(logprobs) == 12
    for at, (token, chances) in enumerate(zip(ids, logprobs, strict=True)):
        toy_logits(row, History([*WORK.prompt_ids, *ids[:at]]))
        wide = row.astype(np.float64)
        expected = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
        top = np.argsort(-wide, kind="stable")[:3].tolist()
        assert [t for t, _ in chances] == [token, *top]
        assert [p for _, p in chances] == pytest.approx(expected[[token, *top]].tolist(), abs=2e-6)


def test_a_recovered_sequence_tells_the_same_as_an_undisturbed_one() -> None:
    ids, logprobs = told(run(WORK))
    recovered = replace(WORK, answer_ids=ids[:5])
    assert told(run(recovered)) == (ids[5:], logprobs[5:])


def test_nobody_who_does_not_ask_is_told() -> None:
    assert told(run(replace(WORK, sampling=Sampling(temperature=0))))[1] == []


@pytest.mark.parametrize(
    "work",
    [
        replace(WORK, prompt_ids=(5, 1000)),
        replace(WORK, prompt_ids=(-1, 5)),
        replace(WORK, answer_ids=(1000,)),
        replace(WORK, sampling=Sampling(logit_bias=((1000, 1.0),))),
    ],
)
def test_a_token_beyond_the_vocabulary_fails_its_sequence_alone(work: SequenceWork) -> None:
    """One in a prompt once killed the engine's thread, and its worker with it."""
    failed = [news for news in run(work) if isinstance(news, SequenceFailed)]
    assert [news.permanent for news in failed] == [True]
    assert "from 0 to 999" in failed[0].detail

"""Texts become vectors beside generation, and never change it."""

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from diptych_contracts.errors import Permanent, Refused
from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    NewTokens,
    Phase,
    SequenceKey,
    SequenceWork,
    StepInput,
    StepReport,
)
from diptych_engine.sim import EMBEDDING_SIZE, SimEmbedder
from diptych_engine.step_loop import StepLoop
from diptych_testkit.small_fleet import NoStops
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

TEXTS = [[1, 2, 3], list(range(5, 200)), [7], [1, 2, 4]]


def loop_of(engine: ToyStepEngine, reports: list[StepReport] | None = None) -> StepLoop:
    loop = StepLoop(engine, lambda _stopping: NoStops())
    loop.start((reports if reports is not None else []).append)
    return loop


def vectors(loop: StepLoop, texts: Sequence[Sequence[int]]) -> Any:
    return loop.embed(texts).result(60)


def test_alone_and_in_a_crowd_a_text_has_the_same_vector_of_length_1() -> None:
    loop = loop_of(ToyStepEngine())
    alone = [vectors(loop, [text])[0] for text in TEXTS]
    together = [loop.embed(TEXTS) for _ in range(8)]
    for done in together:
        found = done.result(60)
        assert found.shape == (len(TEXTS), EMBEDDING_SIZE)
        assert np.array_equal(found, np.stack(alone))
        assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(len(TEXTS)))
    assert alone[0] @ alone[3] > alone[0] @ alone[2] + 0.2
    loop.stop()


def test_a_stream_beside_a_crowd_of_texts_says_what_it_says_alone() -> None:
    prompt, reports = [5, 6, 7], list[StepReport]()
    loop = loop_of(ToyStepEngine(), reports)
    crowd = [loop.embed(TEXTS) for _ in range(64)]
    loop.submit(
        SequenceWork(
            key=SequenceKey(RequestId("r"), 1),
            phase=Phase.GENERATE,
            prompt_ids=prompt,
            answer_ids=(),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=40),
        )
    )
    for done in crowd:
        done.result(60)
    ended = threading.Event()
    while not ended.wait(0.01):
        news = [n for report in list(reports) for n in report.news if isinstance(n, NewTokens)]
        if news and news[-1].finish is not None:
            ended.set()
    assert [token for n in news for token in n.token_ids] == toy_answer(prompt, 40)
    loop.stop()
    loop.check()


def test_what_texts_cost_is_told() -> None:
    reports = list[StepReport]()
    loop = loop_of(ToyStepEngine(), reports)
    vectors(loop, TEXTS)
    loop.stop()
    assert sum(report.prefill_tokens for report in reports) == sum(map(len, TEXTS))
    assert all(report.duration_s > 0 and not report.news for report in reports)


class HeldUp(SimEmbedder):
    """An embedder that waits in its first chunk."""

    def __init__(self) -> None:
        super().__init__(max_tokens=4096)
        self.began, self.go, self.fed = threading.Event(), threading.Event(), 0

    def feed(self, token_ids: Sequence[int]) -> None:
        self.began.set()
        assert self.go.wait(60)
        self.fed += len(token_ids)
        super().feed(token_ids)


def test_who_leaves_costs_a_chunk_at_most() -> None:
    engine = ToyStepEngine()
    engine.embedder = held = HeldUp()
    loop = loop_of(engine)
    left, stays = loop.embed([list(range(1, 1000))]), loop.embed([[3]])
    assert held.began.wait(60)
    left.cancel()
    held.go.set()
    assert stays.result(60).shape == (1, EMBEDDING_SIZE)
    assert held.fed == held.chunk_tokens + 1
    loop.stop()


def test_an_engine_that_stops_gives_up_what_waits() -> None:
    engine = ToyStepEngine()
    engine.embedder = held = HeldUp()
    loop = loop_of(engine)
    waiting = [loop.embed([[1]]), loop.embed([[2]])]
    assert held.began.wait(60)
    held.go.set()
    loop.stop()
    with pytest.raises(CancelledError):
        waiting[1].result(60)
    with pytest.raises(RuntimeError):
        loop.embed([[1]])


@pytest.mark.parametrize("texts", [[], [[]], [[1], []], [[1] * 4097]])
def test_what_cannot_be_a_text_is_refused(texts: list[list[int]]) -> None:
    loop = loop_of(ToyStepEngine())
    with pytest.raises(Refused):
        loop.embed(texts)
    loop.stop()


class NoMemory(SimEmbedder):
    def begin(self) -> None:
        raise Permanent("no memory")


def test_a_text_that_cannot_be_computed_fails_alone() -> None:
    engine = ToyStepEngine()
    engine.embedder = NoMemory(max_tokens=10)
    loop = loop_of(engine)
    with pytest.raises(Permanent):
        vectors(loop, [[1]])
    engine.embedder = None  # type: ignore[assignment]
    loop.stop()


def test_without_an_embedder_nothing_is_promised() -> None:
    engine = ToyStepEngine()
    engine.embedder = None  # type: ignore[assignment]
    loop = loop_of(engine)
    with pytest.raises(Refused):
        loop.embed([[1]])
    loop.stop()


def test_embedding_waits_for_generations_share() -> None:
    """Where steps take as long as chunks, there are two steps to a chunk."""
    order: list[str] = []

    class Watched(SimEmbedder):
        def feed(self, token_ids: Sequence[int]) -> None:
            order.append("chunk")
            super().feed(token_ids)

    def on_step(_inputs: Sequence[StepInput]) -> None:
        order.append("step")

    now = iter(range(1_000_000))
    engine = ToyStepEngine(on_step=on_step)
    engine.embedder = Watched(max_tokens=4096)
    loop = StepLoop(engine, lambda _stopping: NoStops(), clock=lambda: float(next(now)))
    loop.submit(
        SequenceWork(
            key=SequenceKey(RequestId("r"), 1),
            phase=Phase.GENERATE,
            prompt_ids=[5],
            answer_ids=(),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=30),
        )
    )
    done = loop.embed([[1]] * 100)
    loop.start(lambda _report: None)
    done.result(60)
    beside = order[: len(order) - order[::-1].index("step")]
    assert beside.count("step") == 30
    assert beside.count("chunk") == pytest.approx(15, abs=1)
    loop.stop()

"""One bare engine in one process: the answer every path must equal."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from diptych_contracts.cards import KvLayout
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    Engine,
    NewTokens,
    Phase,
    SequenceFailed,
    SequenceKey,
    SequenceWork,
    StepReport,
)

_ANSWER_S = 1800.0
"""2,000 tokens of prompt, on a machine that has other work."""
_GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt, and how it is answered."""

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = _GREEDY


class BareEngine:
    """Answers prompts, without any of Diptych around the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: dict[RequestId, list[int]] = {}
        self.finishes: dict[int, EndReason] = {}
        """Why the answers of the last `answers` ended, by the place of their questions."""
        self._failures: list[SequenceFailed] = []
        self._running: set[RequestId] = set()
        self._ended = threading.Event()
        self._asked = 0
        self.layout: KvLayout = engine.spec.layout
        engine.start(self._hear)

    def _hear(self, report: StepReport) -> None:
        for news in report.news:
            if isinstance(news, NewTokens):
                self._answers[news.key.request_id] += news.token_ids
                if news.finish is not None:
                    self.finishes[list(self._answers).index(news.key.request_id)] = news.finish
                    self._ends(news.key.request_id)
            elif isinstance(news, SequenceFailed):
                self._failures.append(news)
                self._ends(news.key.request_id)

    def _ends(self, name: RequestId) -> None:
        self._running.discard(name)
        if not self._running:
            self._ended.set()

    def answer(
        self, prompt_ids: Sequence[int], max_tokens: int, sampling: Sampling | None = None
    ) -> list[int]:
        """The engine's answer to a prompt, greedy unless `sampling` says otherwise."""
        question = Question(prompt_ids, max_tokens, sampling or _GREEDY)
        return self.answers([question])[0]

    def answers(self, questions: Sequence[Question]) -> list[list[int]]:
        """The engine's answers to several prompts at once, each of which must find a seat."""
        names = [RequestId(f"bare-{self._asked + n}") for n in range(len(questions))]
        self._asked += len(questions)
        self._answers = {name: [] for name in names}
        self._running = set(names)
        self.finishes = {}
        self._ended.clear()
        for name, question in zip(names, questions, strict=True):
            self._engine.submit(
                SequenceWork(
                    key=SequenceKey(name, 1),
                    phase=Phase.GENERATE,
                    prompt_ids=question.prompt_ids,
                    answer_ids=(),
                    sampling=question.sampling,
                    stopping=Stopping(max_tokens=question.max_tokens),
                )
            )
        assert self._ended.wait(_ANSWER_S * len(questions)), "the bare engine does not answer"
        assert not self._failures, self._failures
        return [self._answers[name] for name in names]

    def close(self) -> None:
        """Free the engine."""
        self._engine.stop()

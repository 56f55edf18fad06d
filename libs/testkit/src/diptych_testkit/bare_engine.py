"""One bare engine in one process: the answer every path must equal."""

import threading
from collections.abc import Sequence

from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    Engine,
    NewTokens,
    Phase,
    SequenceKey,
    SequenceWork,
    StepReport,
)


class BareEngine:
    """Answers prompts one after another, without any of Diptych around the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answer: list[int] = []
        self._ended = threading.Event()
        self._asked = 0
        engine.start(self._hear)

    def _hear(self, report: StepReport) -> None:
        for news in report.news:
            if isinstance(news, NewTokens):
                self._answer += news.token_ids
                if news.finish is not None:
                    self._ended.set()

    def answer(
        self, prompt_ids: Sequence[int], max_tokens: int, sampling: Sampling | None = None
    ) -> list[int]:
        """The engine's answer to a prompt, greedy unless `sampling` says otherwise."""
        self._asked += 1
        self._answer = []
        self._ended.clear()
        self._engine.submit(
            SequenceWork(
                key=SequenceKey(RequestId(f"bare-{self._asked}"), 1),
                phase=Phase.GENERATE,
                prompt_ids=prompt_ids,
                answer_ids=(),
                sampling=sampling or Sampling(temperature=0.0),
                stopping=Stopping(max_tokens=max_tokens),
            )
        )
        assert self._ended.wait(120), "the bare engine does not answer"
        return list(self._answer)

    def close(self) -> None:
        """Free the engine."""
        self._engine.stop()

"""What `RequestLoop` adds to an engine that schedules by itself."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    NewTokens,
    Phase,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceStarted,
    SequenceWork,
    StepNews,
    StepReport,
    never,
)
from diptych_engine.request_loop import RequestLoop
from diptych_engine.request_watch import WatchTimes
from diptych_testkit.toy_engine import toy_answer
from diptych_testkit.toy_request_engine import ToyRequestEngine, ToySettings, Wire

WAIT_S = 20.0
TIMES = WatchTimes(health_s=0.05, stats_s=0.02)
PROMPT = tuple(range(5, 75))


class Words:
    """Stop text whose tokens are words: token 7 is "7 "."""

    def __init__(self, stopping: Stopping) -> None:
        self._stop = stopping.stop
        self._text = ""

    @property
    def stopped(self) -> bool:
        return any(s in self._text for s in self._stop)

    def push(self, token_ids: object) -> str:
        self._text += "".join(f"{t} " for t in token_ids)  # type: ignore[attr-defined]
        return ""


class Heard:
    """A request loop on a toy, and everything it said."""

    def __init__(self, engine: ToyRequestEngine) -> None:
        self.engine = engine
        self.crash: BaseException | None = None
        self.reports: list[StepReport] = []
        self._heard = threading.Condition()
        self.loop = RequestLoop(engine, Words, on_crash=self._crashed, times=TIMES)

    def start(self, *, paused: Callable[[], bool] = never) -> "Heard":
        self.loop.start(self._listen, paused=paused)
        return self

    def _listen(self, report: StepReport) -> None:
        with self._heard:
            self.reports.append(report)
            self._heard.notify_all()

    def _crashed(self, error: BaseException) -> None:
        with self._heard:
            self.crash = error
            self._heard.notify_all()

    @property
    def news(self) -> list[StepNews]:
        return [news for report in self.reports for news in report.news]

    def of(self, key: SequenceKey) -> list[StepNews]:
        return [news for news in self.news if news.key == key]

    def until(self, done: Callable[[], bool]) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: done() or bool(self.crash), WAIT_S), self.news
        assert self.crash is None or self.reports == []

    def ended(self, job: SequenceWork) -> StepNews:
        """Waits for the news with which `job` leaves."""

        def ends() -> list[StepNews]:
            return [news for news in self.of(job.key) if _is_end(news, job)]

        self.until(lambda: bool(ends()))
        return ends()[0]

    def answer(self, job: SequenceWork) -> list[int]:
        self.ended(job)
        said = [news for news in self.of(job.key) if isinstance(news, NewTokens)]
        for news, before in zip(said[1:], said, strict=False):
            assert news.index == before.index + len(before.token_ids)
        return [token for news in said for token in news.token_ids]


def _is_end(news: StepNews, job: SequenceWork) -> bool:
    if isinstance(news, NewTokens):
        return news.finish is not None or job.phase is Phase.PREFILL
    return isinstance(news, SequenceFailed | SequenceAborted)


def work(name: str = "r", **changes: object) -> SequenceWork:
    stopping = Stopping(
        max_tokens=changes.pop("max_tokens", 8),  # type: ignore[arg-type]
        stop=changes.pop("stop", ()),  # type: ignore[arg-type]
    )
    base = SequenceWork(
        key=SequenceKey(RequestId(name), 1),
        phase=Phase.GENERATE,
        prompt_ids=PROMPT,
        answer_ids=(),
        sampling=Sampling(temperature=0),
        stopping=stopping,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def loops() -> Iterator[Callable[..., Heard]]:
    made: list[Heard] = []

    def make(*, wire: Wire | None = None, **settings: object) -> Heard:
        made.append(Heard(ToyRequestEngine(ToySettings(**settings), wire=wire)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for heard in made:
        heard.loop.stop()


def test_an_answer_comes_in_order_and_costs_what_it_took(loops) -> None:
    heard = loops(token_s=0.001).start()
    job = work()
    heard.loop.submit(job)
    assert heard.answer(job) == toy_answer(PROMPT, 8)
    assert heard.of(job.key)[0] == SequenceStarted(job.key)
    assert sum(r.prefill_tokens for r in heard.reports) == len(PROMPT)
    assert sum(r.decode_tokens for r in heard.reports) == 7
    costly = [r for r in heard.reports if r.tokens_by_key]
    assert all(r.duration_s > 0 for r in costly)
    assert sum(r.tokens_by_key[job.key] for r in costly) == len(PROMPT) + 7

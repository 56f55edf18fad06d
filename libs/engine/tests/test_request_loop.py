"""What `RequestLoop` adds to an engine that schedules by itself."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from diptych_contracts.errors import Permanent
from diptych_contracts.handoffs import FirstToken
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    HandOffReady,
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
from diptych_policy.prefixes import block_hashes
from diptych_testkit.engine_pairs import eventually
from diptych_testkit.toy_engine import toy_answer
from diptych_testkit.toy_request_engine import ToyRequestEngine, ToySettings, Wire

WAIT_S = 60.0
TIMES = WatchTimes(health_s=0.05, answer_s=60.0, stats_s=0.02)
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


def test_what_waits_for_a_seat_is_not_asked_yet(loops) -> None:
    heard = loops(max_sequences=2, token_s=0.001).start()
    jobs = [work(f"r{n}", max_tokens=20) for n in range(5)]
    for job in jobs:
        heard.loop.submit(job)
    answers = [heard.answer(job) for job in jobs]
    assert answers == [toy_answer(PROMPT, 20)] * 5
    assert [w.key for w in heard.engine.asked] == [job.key for job in jobs]


def test_news_of_one_turn_come_in_one_report(loops) -> None:
    heard = loops()
    jobs = [work(f"r{n}") for n in range(6)]
    for job in jobs:
        heard.loop.submit(job)
    heard.start()
    for job in jobs:
        heard.answer(job)
    started = [r for r in heard.reports if any(isinstance(n, SequenceStarted) for n in r.news)]
    assert [len(r.news) for r in started] == [6]


def test_beyond_a_stop_string_the_engine_is_not_listened_to(loops) -> None:
    heard = loops(delta_tokens=5).start()
    answer = toy_answer(PROMPT, 8)
    job = work(stop=(f"{answer[1]} {answer[2]} ",))
    heard.loop.submit(job)
    assert heard.answer(job) == answer[:3]
    assert heard.ended(job).finish is EndReason.STOP
    eventually(lambda: heard.loop.load().running == 0, lambda: "held")
    assert heard.engine.aborted == [job.key]


def test_an_adapter_that_lets_go_late_is_waited_for(loops) -> None:
    heard = loops(token_s=0.001).start()
    heard.engine.faults.never_lets_go = True
    job = work(max_tokens=1000)
    heard.loop.submit(job)
    heard.until(lambda: len(heard.of(job.key)) > 3)
    heard.loop.abort(job.key)
    heard.loop.abort(job.key)
    eventually(lambda: bool(heard.loop._seats.all()[0].aborting), lambda: "no abort")
    assert not [n for n in heard.of(job.key) if isinstance(n, SequenceAborted)]
    assert heard.loop.load().running == 1
    heard.loop._loop.call_soon_threadsafe(heard.engine.released.set)
    heard.until(lambda: isinstance(heard.of(job.key)[-1], SequenceAborted))
    assert heard.engine.aborted == [job.key]
    assert heard.loop.load().running == 0


def test_an_engine_that_hangs_is_found_gone_and_may_come_back(loops) -> None:
    heard = loops(token_s=0.001).start()
    heard.engine.faults.hangs_after = 2
    job = work()
    heard.loop.submit(job)
    heard.until(lambda: len(heard.of(job.key)) >= 3)
    heard.engine.faults.dead = "out of memory"
    failure = heard.ended(job)
    assert isinstance(failure, SequenceFailed)
    assert (failure.reason, failure.permanent) == ("engine_gone", False)
    assert heard.loop.gone == "out of memory"
    late = work("late")
    heard.loop.submit(late)
    assert isinstance(heard.ended(late), SequenceFailed)
    heard.engine.faults.dead = heard.engine.faults.hangs_after = None
    pause = threading.Event()
    while heard.loop.gone is not None:
        pause.wait(0.01)
    again = work("again")
    heard.loop.submit(again)
    assert heard.answer(again) == toy_answer(PROMPT, 8)


def test_an_engine_that_never_will_be_ready_is_one_clear_line(loops) -> None:
    heard = loops()
    heard.engine.faults.never_works = True
    with pytest.raises(Permanent, match="the toy is broken"):
        heard.loop.open()
    assert heard.crash is None
    assert heard.engine.closed


def test_nothing_is_read_while_nothing_can_be_told(loops) -> None:
    heard = loops()
    pausing = threading.Event()
    pausing.set()
    heard.start(paused=pausing.is_set)
    job = work()
    heard.loop.submit(job)
    threading.Event().wait(0.1)
    assert heard.reports == []
    pausing.clear()
    assert heard.answer(job) == toy_answer(PROMPT, 8)


def test_blocks_an_engine_keeps_are_told_by_tenant_until_they_are_gone(loops) -> None:
    heard = loops().start()
    jobs = [replace(work(f"r-{tenant}"), tenant=tenant) for tenant in ("a", "b")]
    prompt = tuple(range(5, 5 + 130))
    jobs = [replace(job, phase=Phase.PREFILL, prompt_ids=prompt) for job in jobs]
    for job in jobs:
        heard.loop.submit(job)
        heard.ended(job)
    stored = lambda: {b for r in heard.reports for b in r.blocks_stored}  # noqa: E731
    removed = lambda: {b for r in heard.reports for b in r.blocks_removed}  # noqa: E731
    a, b = (set(block_hashes(tenant, "toy", prompt, 64)) for tenant in ("a", "b"))
    heard.until(lambda: stored() == a | b)
    assert heard.loop.forget("a").result(WAIT_S) == 2
    heard.until(lambda: removed() == a)
    again = replace(jobs[0], key=SequenceKey(RequestId("again"), 1))
    heard.loop.submit(again)
    heard.ended(again)
    assert heard.engine.asked[-1].tenant != "a"
    heard.loop._loop.call_soon_threadsafe(heard.engine.forget_kv)
    heard.until(lambda: removed() == a | b)


def test_a_prefill_offers_before_its_token_or_before_it_computes(loops) -> None:
    for up_front, first in ((False, FirstToken.PREFILL), (True, FirstToken.DECODE)):
        heard = loops(pair_up_front=up_front, first_token=first, orphan_ms=50).start()
        job = replace(work(), phase=Phase.PREFILL)
        heard.loop.submit(job)
        heard.ended(job)
        started, ready, token = heard.of(job.key)
        assert isinstance(started, SequenceStarted)
        assert isinstance(ready, HandOffReady)
        assert isinstance(token, NewTokens)
        assert len(token.token_ids) == (0 if up_front else 1)
        assert token.cached_tokens in (None, 0)


def test_a_bug_of_an_adapter_ends_the_process_at_once(loops) -> None:
    heard = loops().start()
    heard.engine.stats = None  # type: ignore[assignment]
    heard.until(lambda: heard.crash is not None)
    assert isinstance(heard.crash, BaseExceptionGroup)


def test_stop_lets_go_of_everything(loops) -> None:
    heard = loops(token_s=0.001).start()
    job = work(max_tokens=1000)
    heard.loop.submit(job)
    heard.until(lambda: len(heard.of(job.key)) > 2)
    heard.loop.stop()
    assert heard.engine.closed
    assert not heard.engine.held
    assert heard.loop.forget("t").cancelled()
    with pytest.raises(RuntimeError, match="has stopped"):
        heard.loop.submit(work("late"))

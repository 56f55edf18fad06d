import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from diptych_contracts.cards import Fingerprint
from diptych_contracts.errors import Unverified
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    KvBlock,
    NewTokens,
    Phase,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceStarted,
    SequenceWork,
    StepInput,
    StepNews,
    StepReport,
    never,
)
from diptych_engine.sim import SimSettings, SimStepEngine
from diptych_engine.step_loop import StepLoop
from diptych_policy.prefixes import Prefix, block_hashes
from diptych_testkit.toy_engine import EOS_ID, ToyStepEngine, toy_answer

WAIT_S = 60.0


class Words:
    """Stop text whose tokens are words: token 7 is "7 "."""

    def __init__(self, stopping: Stopping) -> None:
        self._stop = stopping.stop
        self._text = ""

    @property
    def stopped(self) -> bool:
        return any(s in self._text for s in self._stop)

    def push(self, token_ids: Sequence[int]) -> str:
        self._text += "".join(f"{t} " for t in token_ids)
        return ""


class Sink:
    """Keeps blocks in memory."""

    def __init__(self, slot_bytes: int, blocks: int) -> None:
        self.slots = [bytearray(slot_bytes) for _ in range(blocks)]
        self.sizes: dict[int, int] = {}
        self.order: list[int] = []

    def buffer(self, index: int) -> memoryview:
        return memoryview(self.slots[index])

    def written(self, index: int, n_bytes: int) -> None:
        self.sizes[index] = n_bytes
        self.order.append(index)

    def blocks(self, n_tokens: int, size: int = 64) -> tuple[KvBlock, ...]:
        return tuple(
            KvBlock(
                i * size,
                min((i + 1) * size, n_tokens),
                memoryview(self.slots[i])[: self.sizes[i]].toreadonly(),
            )
            for i in sorted(self.sizes)
        )


class Loop:
    """A step loop, and everything it said."""

    def __init__(self, engine: SimStepEngine, *, started: bool = True) -> None:
        self.engine = engine
        self.crash: BaseException | None = None
        self.loop = StepLoop(engine, Words, on_crash=self._crashed)
        self.reports: list[StepReport] = []
        self._heard = threading.Condition()
        if started:
            self.loop.start(self._listen)

    def start(self, *, paused: Callable[[], bool] = never) -> None:
        self.loop.start(self._listen, paused=paused)

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

    def until(self, done: Callable[[], bool]) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: done() or bool(self.crash), WAIT_S), self.news

    def of(self, key: SequenceKey, kind: type[StepNews]) -> list[StepNews]:
        return [n for n in self.news if isinstance(n, kind) and n.key == key]

    def tokens(self, key: SequenceKey) -> list[int]:
        return [t for n in self.of(key, NewTokens) for t in n.token_ids]

    def finish(self, key: SequenceKey) -> EndReason | None:
        def ends() -> list[EndReason | None]:
            return [n.finish for n in self.of(key, NewTokens) if n.finish]

        self.until(lambda: bool(ends() or self.of(key, SequenceFailed)))
        return ends()[0] if ends() else None

    def failure(self, key: SequenceKey) -> SequenceFailed:
        self.until(lambda: bool(self.of(key, SequenceFailed)))
        return self.of(key, SequenceFailed)[0]

    def ends(self, key: SequenceKey) -> list[StepNews]:
        done = [n for n in self.of(key, NewTokens) if isinstance(n, NewTokens) and n.finish]
        return [*done, *self.of(key, SequenceAborted)]

    def is_idle(self) -> None:
        self.loop.check()
        load = self.loop.load()
        assert (load.running, load.waiting, load.waiting_tokens, load.kv_tokens_used) == (0,) * 4
        assert self.engine.cells_used == 0


def a_sim() -> SimStepEngine:
    return SimStepEngine(
        SimSettings(
            spoken=range(1, 1000),
            vocab_size=1000,
            eos_ids=(EOS_ID,),
            fingerprint=Fingerprint(base="sim", weights="none"),
            context_tokens=4096,
            kv_tokens=8192,
            max_sequences=2,
        )
    )


@pytest.fixture
def loops() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(*, started: bool = True, **settings: object) -> Loop:
        made.append(Loop(ToyStepEngine(**settings), started=started))
        return made[-1]

    yield make
    for loop in made:
        loop.loop.stop()


def work(name: str = "r", **changes: object) -> SequenceWork:
    max_tokens = changes.pop("max_tokens", 5)
    stop = changes.pop("stop", ())
    ignore_eos = changes.pop("ignore_eos", False)
    base = SequenceWork(
        key=SequenceKey(RequestId(name), 1),
        phase=Phase.GENERATE,
        prompt_ids=tuple(range(1, 101)),
        answer_ids=(),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos),
    )
    return replace(base, **changes)


def test_generate_gives_the_greedy_answer_and_frees_everything(loops) -> None:
    loop, job = loops(), work()
    loop.loop.submit(job)
    assert loop.finish(job.key) is EndReason.LENGTH
    assert loop.tokens(job.key) == toy_answer(job.prompt_ids, 5)
    assert [n.index for n in loop.of(job.key, NewTokens)] == [0, 1, 2, 3, 4]
    assert loop.news[0] == SequenceStarted(job.key)
    loop.is_idle()


def test_reports_count_what_each_step_computed(loops) -> None:
    loop, job = loops(), work(max_tokens=3)
    loop.loop.submit(job)
    loop.finish(job.key)
    computed = [r for r in loop.reports if r.tokens_by_key]
    assert [r.tokens_by_key[job.key] for r in computed] == [64, 36, 1, 1]
    assert [(r.prefill_tokens, r.decode_tokens) for r in computed] == [
        (64, 0),
        (36, 0),
        (0, 1),
        (0, 1),
    ]


def test_many_at_once_each_get_their_own_answer(loops) -> None:
    loop = loops(max_sequences=4)
    jobs = [work(f"r{i}", prompt_ids=tuple(range(1, 2 + 17 * i))) for i in range(12)]
    for job in jobs:
        loop.loop.submit(job)
    for job in jobs:
        assert loop.finish(job.key) is EndReason.LENGTH
        assert loop.tokens(job.key) == toy_answer(job.prompt_ids, 5)
    loop.is_idle()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_prefill_here_and_decode_there_equal_generating_in_one_place(loops, length: int) -> None:
    prefill, decode = loops(), loops(max_sequences=2)
    sink = Sink(prefill.engine.spec.layout.slot_bytes, 4)
    job = work(prompt_ids=tuple(range(1, length + 1)))
    prefill.loop.submit(replace(job, phase=Phase.PREFILL, sink=sink))
    prefill.until(lambda: bool(prefill.of(job.key, NewTokens)))
    first = prefill.tokens(job.key)
    assert sink.order == list(range(-(-length // 64)))
    prefill.is_idle()

    imported = threading.Event()
    rest = replace(
        job,
        phase=Phase.DECODE,
        answer_ids=tuple(first),
        blocks=sink.blocks(length),
        on_imported=imported.set,
    )
    decode.loop.submit(rest)
    assert decode.finish(job.key) is EndReason.LENGTH
    assert imported.is_set()
    assert first + decode.tokens(job.key) == toy_answer(job.prompt_ids, 5)
    assert [n.index for n in decode.of(job.key, NewTokens)] == [1, 2, 3, 4]
    decode.is_idle()


def test_blocks_are_handed_over_before_the_next_chunk_computes(loops) -> None:
    seen: list[int] = []
    sink = Sink(1000, 4)
    loop = loops(on_step=lambda _inputs: seen.append(len(sink.order)))
    job = work(phase=Phase.PREFILL, prompt_ids=tuple(range(1, 201)), sink=sink)
    loop.loop.submit(job)
    loop.until(lambda: bool(loop.of(job.key, NewTokens)))
    assert seen == [0, 1, 2, 3]


def test_a_recovered_answer_goes_on_where_it_was(loops) -> None:
    loop = loops()
    whole = toy_answer(tuple(range(1, 101)), 8)
    sink = Sink(loop.engine.spec.layout.slot_bytes, 4)
    again = work("again", answer_ids=tuple(whole[:3]), max_tokens=8)
    loop.loop.submit(again)
    handed = work("handed", phase=Phase.PREFILL, answer_ids=tuple(whole[:3]), sink=sink)
    loop.loop.submit(handed)
    loop.finish(again.key)
    assert loop.tokens(again.key) == whole[3:]
    assert loop.of(again.key, NewTokens)[0].index == 3
    loop.until(lambda: bool(loop.of(handed.key, NewTokens)))
    assert loop.of(handed.key, NewTokens) == [NewTokens(handed.key, 3, (whole[3],))]
    assert sink.blocks(103)[-1].p1 == 103


def test_end_of_text_ends_the_answer_without_a_token(loops) -> None:
    loop = loops(eos_at=103)
    job = work(max_tokens=50)
    loop.loop.submit(job)
    assert loop.finish(job.key) is EndReason.STOP
    assert loop.of(job.key, NewTokens)[-1] == NewTokens(job.key, 3, (), EndReason.STOP)
    assert loop.tokens(job.key) == toy_answer(job.prompt_ids, 3)
    loop.is_idle()


def test_ignoring_end_of_text_goes_on(loops) -> None:
    loop = loops(eos_at=102)
    job = work(ignore_eos=True)
    loop.loop.submit(job)
    assert loop.finish(job.key) is EndReason.LENGTH
    assert loop.tokens(job.key)[2:] == [EOS_ID] * 3


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(loops) -> None:
    loop = loops()
    third = toy_answer(tuple(range(1, 101)), 3)
    job = work(max_tokens=50, stop=(f"{third[1]} {third[2]}",))
    loop.loop.submit(job)
    assert loop.finish(job.key) is EndReason.STOP
    assert loop.tokens(job.key) == third
    resumed = replace(job, key=SequenceKey(job.key.request_id, 2), answer_ids=tuple(third[:2]))
    loop.loop.submit(resumed)
    assert loop.finish(resumed.key) is EndReason.STOP
    assert loop.tokens(resumed.key) == [third[2]]


def test_an_answer_that_is_complete_already_ends_at_once(loops) -> None:
    loop = loops()
    imported = threading.Event()
    answer = tuple(toy_answer(tuple(range(1, 101)), 5))
    job = work(answer_ids=answer, phase=Phase.DECODE, on_imported=imported.set)
    loop.loop.submit(job)
    assert loop.finish(job.key) is EndReason.LENGTH
    assert loop.of(job.key, NewTokens) == [NewTokens(job.key, 5, (), EndReason.LENGTH)]
    assert imported.is_set()
    assert loop.engine.steps == 0


def test_a_full_context_ends_the_answer(loops) -> None:
    loop = loops(context_tokens=102)
    job = work(max_tokens=50)
    loop.loop.submit(job)
    assert loop.finish(job.key) is EndReason.LENGTH
    assert loop.tokens(job.key) == toy_answer(job.prompt_ids, 2)


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({}, {"context_tokens": 100}, "context_overflow"),
        ({"prompt_ids": ()}, {}, "context_overflow"),
        ({"max_tokens": 500}, {"kv_tokens": 200}, "no_room"),
        ({"phase": Phase.DECODE}, {}, "unverified_kv"),
        ({"phase": Phase.DECODE, "answer_ids": (5,)}, {}, "unverified_kv"),
    ],
)
def test_what_cannot_run_fails_alone(loops, changes, settings, reason: str) -> None:
    loop = loops(**settings)
    job, good = work(**changes), work("good", prompt_ids=(1, 2, 3))
    loop.loop.submit(job)
    loop.loop.submit(good)
    assert loop.failure(job.key).reason == reason
    assert loop.finish(good.key) is EndReason.LENGTH
    loop.is_idle()


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"prompt_ids": (1, 2, 1000)}, "1000 at position 2"),
        ({"prompt_ids": (-1, 2)}, "-1 at position 0"),
        ({"prompt_ids": array("H", [5, 1000])}, "1000 at position 1"),
        ({"prompt_ids": (2**40,)}, f"{2**40} at position 0"),
        ({"phase": Phase.PREFILL, "prompt_ids": (1000,), "sink": Sink(1000, 1)}, "1000 at"),
        ({"phase": Phase.DECODE, "answer_ids": (3, 1000)}, "1000 at position 1"),
        ({"sampling": Sampling(logit_bias=((7, 1.0), (1000, 1.0)))}, "1000 at position 1"),
    ],
)
@pytest.mark.parametrize("kind", [ToyStepEngine, a_sim])
def test_a_token_the_model_has_not_is_refused_for_good(
    kind: Callable[[], SimStepEngine], changes: dict[str, Any], seen: str
) -> None:
    """One beyond the vocabulary ended the engine's thread, and with it the worker's process."""
    loop = Loop(kind())
    try:
        job, good = work(**changes), work("good", prompt_ids=(1, 2, 999))
        loop.loop.submit(job)
        loop.loop.submit(good)
        failed = loop.failure(job.key)
        assert failed.permanent
        assert f"expected token ids from 0 to 999, saw {seen}" in failed.detail
        assert loop.finish(good.key) is EndReason.LENGTH
        loop.is_idle()
    finally:
        loop.loop.stop()


def test_kv_the_engine_refuses_fails_the_sequence_and_frees_what_was_imported(loops) -> None:
    loop = loops()
    sink = Sink(loop.engine.spec.layout.slot_bytes, 2)
    job = work(phase=Phase.PREFILL, sink=sink)
    loop.loop.submit(job)
    loop.until(lambda: bool(loop.of(job.key, NewTokens)))
    sink.slots[1][0] ^= 1
    bad = work("bad", phase=Phase.DECODE, answer_ids=(9,), blocks=sink.blocks(100))
    loop.loop.submit(bad)
    assert loop.failure(bad.key).reason == "unverified_kv"
    loop.is_idle()


def test_abort_frees_a_running_a_waiting_and_answers_for_an_unknown_sequence(loops) -> None:
    go, stepping = threading.Event(), threading.Event()

    def hold(_inputs: Sequence[StepInput]) -> None:
        stepping.set()
        assert go.wait(WAIT_S)

    loop = loops(max_sequences=1, on_step=hold)
    running, waiting = work("running", max_tokens=1000), work("waiting")
    unknown = SequenceKey(RequestId("unknown"), 1)
    loop.loop.submit(running)
    assert stepping.wait(WAIT_S)
    loop.loop.submit(waiting)
    load = loop.loop.load()
    assert (load.running, load.waiting, load.kv_tokens_used) == (1, 1, 1100 + 105)
    for key in (running.key, waiting.key, unknown):
        loop.loop.abort(key)
    go.set()
    for key in (running.key, waiting.key, unknown):
        loop.until(lambda key=key: bool(loop.of(key, SequenceAborted)))
    assert loop.tokens(waiting.key) == []
    loop.is_idle()


def test_the_same_seed_gives_the_same_answer_in_any_company(loops) -> None:
    sampling = Sampling(temperature=1.5, seed=11)
    alone, crowded = loops(), loops(max_sequences=3)
    job = work(sampling=sampling, max_tokens=12)
    alone.loop.submit(job)
    alone.finish(job.key)
    for i in range(4):
        crowded.loop.submit(work(f"other{i}", prompt_ids=(i + 1,), max_tokens=20))
    crowded.loop.submit(job)
    crowded.finish(job.key)
    assert alone.tokens(job.key) == crowded.tokens(job.key)
    assert alone.tokens(job.key) != toy_answer(job.prompt_ids, 12)


def test_the_same_attempt_twice_is_a_mistake(loops) -> None:
    loop = loops(started=False)
    loop.loop.submit(work())
    with pytest.raises(ValueError, match="already"):
        loop.loop.submit(work())


def test_a_sink_that_fails_costs_its_sequence_only(loops) -> None:
    class Broken(Sink):
        def written(self, index: int, n_bytes: int) -> None:
            raise Unverified("the link is gone")

    loop = loops()
    job, good = work(phase=Phase.PREFILL, sink=Broken(1000, 4)), work("good")
    loop.loop.submit(job)
    loop.loop.submit(good)
    assert "the link is gone" in loop.failure(job.key).detail
    assert loop.finish(good.key) is EndReason.LENGTH
    loop.is_idle()


def test_a_bug_in_the_engine_is_loud(loops) -> None:
    def fail(_inputs: Sequence[StepInput]) -> None:
        raise RuntimeError("assertion failed in the engine")

    loop = loops(on_step=fail)
    loop.loop.submit(work())
    loop.until(lambda: False)
    assert "assertion failed" in str(loop.crash)


def test_stop_closes_the_engine_started_or_not(loops) -> None:
    for started in (True, False):
        loop = loops(started=started)
        loop.loop.stop()
        assert loop.engine.closed
        with pytest.raises(RuntimeError, match="stopped"):
            loop.loop.submit(work())


CACHING = {"prefix_sequences": 3}
EDGES = [63, 64, 65, 127, 128, 129, 200]


def numbers(length: int, start: int = 1) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def cached(loop: Loop, job: SequenceWork) -> int:
    (started,) = loop.of(job.key, SequenceStarted)
    assert isinstance(started, SequenceStarted)
    return started.cached_tokens


def run(loop: Loop, job: SequenceWork) -> SequenceWork:
    loop.loop.submit(job)
    loop.finish(job.key)
    return job


@pytest.mark.parametrize("length", EDGES)
def test_a_prompt_seen_before_is_computed_from_its_last_block_on(loops, length: int) -> None:
    loop = loops(**CACHING)
    first = run(loop, work("first", prompt_ids=numbers(length), max_tokens=3))
    computed = loop.engine.tokens_computed
    again = run(loop, work("again", prompt_ids=numbers(length), max_tokens=3))
    expected = toy_answer(first.prompt_ids, 3)
    assert loop.tokens(first.key) == loop.tokens(again.key) == expected
    hit = min(length // 64 * 64, length - 1) if length >= 64 else 0
    assert (cached(loop, first), cached(loop, again)) == (0, hit)
    assert loop.engine.tokens_computed - computed == length - hit + 2
    loop.loop.check()


def test_a_conversation_goes_on_from_its_last_answer(loops) -> None:
    loop = loops(**CACHING)
    first = run(loop, work("first", prompt_ids=numbers(60), max_tokens=80))
    turn = (*first.prompt_ids, *loop.tokens(first.key), 7, 8, 9)
    second = run(loop, work("second", prompt_ids=turn))
    assert cached(loop, second) == 128
    assert loop.tokens(second.key) == toy_answer(turn, 5)


def test_prompts_that_part_share_what_comes_before(loops) -> None:
    loop = loops(**CACHING)
    for name in ("a", "b", "c"):
        run(loop, work(name, prompt_ids=(*numbers(128), *numbers(100, ord(name)))))
    loop.loop.check()
    assert loop.engine.cells_used == 64 * (2 + 3)
    back = run(loop, work("d", prompt_ids=(*numbers(128), *numbers(100, ord("b")))))
    assert cached(loop, back) == 192


def test_a_tenant_never_gets_anothers_cells(loops) -> None:
    loop = loops(**CACHING)
    run(loop, work("mine", prompt_ids=numbers(200), tenant="a"))
    theirs = run(loop, work("theirs", prompt_ids=numbers(200), tenant="b"))
    mine = run(loop, work("again", prompt_ids=numbers(200), tenant="a"))
    assert (cached(loop, theirs), cached(loop, mine)) == (0, 192)


@pytest.mark.parametrize("length", EDGES)
def test_cached_blocks_are_handed_over_too(loops, length: int) -> None:
    prefill, decode = loops(**CACHING), loops()
    for name in ("cold", "warm"):
        sink = Sink(prefill.engine.spec.layout.slot_bytes, 4)
        job = work(name, prompt_ids=numbers(length))
        prefill.loop.submit(replace(job, phase=Phase.PREFILL, sink=sink))
        prefill.until(lambda job=job: bool(prefill.of(job.key, NewTokens)))
        assert sink.order == list(range(-(-length // 64)))
        first = tuple(prefill.tokens(job.key))
        decode.loop.submit(
            replace(job, phase=Phase.DECODE, answer_ids=first, blocks=sink.blocks(length))
        )
        decode.finish(job.key)
        assert [*first, *decode.tokens(job.key)] == toy_answer(job.prompt_ids, 5)
    assert cached(prefill, job) == (min(length // 64 * 64, length - 1) if length >= 64 else 0)
    decode.is_idle()


def test_live_work_gets_the_room_that_cached_prefixes_hold(loops) -> None:
    loop = loops(**CACHING, kv_tokens=256)
    for number in range(3):
        run(loop, work(f"r{number}", prompt_ids=numbers(64, 1 + 64 * number)))
    assert loop.engine.cells_used == 192
    big = run(loop, work("big", prompt_ids=numbers(250, 300)))
    assert loop.tokens(big.key) == toy_answer(big.prompt_ids, 5)
    loop.loop.check()
    assert loop.loop.load().kv_tokens_used == 0


def test_cached_prefixes_give_way_while_a_sequence_grows(loops) -> None:
    loop = loops(**CACHING, kv_tokens=256)
    run(loop, work("old", prompt_ids=numbers(130)))
    grown = run(loop, work("grows", prompt_ids=numbers(10, 500), max_tokens=240))
    assert loop.tokens(grown.key) == toy_answer(grown.prompt_ids, 240)
    loop.loop.check()


def test_cached_prefixes_give_way_to_drafted_tokens(loops) -> None:
    """The last cell went to a prefix, and the process died of a draft that was right."""
    loop = loops(**CACHING, kv_tokens=256, draft_tokens=8)
    run(loop, work("old", prompt_ids=numbers(130)))
    jobs = [work(f"r{n}", prompt_ids=numbers(10, 300 * n), max_tokens=110) for n in (1, 2)]
    for job in jobs:
        loop.loop.submit(job)
    for job in jobs:
        assert loop.finish(job.key) is EndReason.LENGTH
        assert loop.tokens(job.key) == toy_answer(job.prompt_ids, 110)
    assert loop.crash is None
    loop.loop.check()


def test_reports_tell_which_blocks_came_and_went(loops) -> None:
    loop = loops(prefix_sequences=1)
    first = run(loop, work("a", prompt_ids=numbers(130)))
    hashes = block_hashes("", "toy", first.prompt_ids, 64)
    run(loop, work("b", prompt_ids=numbers(70, 400)))
    other = block_hashes("", "toy", numbers(70, 400), 64)
    told = [(r.blocks_stored, r.blocks_removed) for r in loop.reports]
    assert [t for t in told if any(t)] == [(hashes, ()), (other, hashes)]


def test_a_forgotten_tenants_prefix_is_dropped_and_said_although_nothing_runs(loops) -> None:
    loop = loops(**CACHING)
    run(loop, replace(work("a", prompt_ids=numbers(130)), tenant="acme"))
    kept = run(loop, replace(work("b", prompt_ids=numbers(130)), tenant="other"))
    before = loop.engine.cells_used
    assert loop.loop.forget("acme").result(timeout=60) == 1
    assert loop.engine.cells_used == before - 128
    assert loop.reports[-1].blocks_removed == block_hashes("acme", "toy", numbers(130), 64)
    assert loop.loop.forget("acme").result(timeout=60) == 0
    again = run(loop, replace(work("c", prompt_ids=numbers(130)), tenant="acme"))
    others = run(loop, replace(kept, key=SequenceKey(RequestId("d"), 1)))
    assert (cached(loop, again), cached(loop, others)) == (0, 128)
    loop.loop.check()


@pytest.mark.parametrize("seed", range(8))
def test_any_traffic_gives_the_same_answers_with_a_cache(loops, seed: int) -> None:
    rng = Random(seed)
    loop = loops(prefix_sequences=rng.choice([1, 3, 8]), kv_tokens=700, max_sequences=4)
    jobs = []
    for number in range(40):
        start, length = rng.choice([1, 1, 200]), rng.choice([1, *EDGES, 300])
        prompt = (*numbers(min(length, 130), start), *numbers(max(0, length - 130), number))
        job = work(f"r{number}", prompt_ids=prompt, max_tokens=rng.randint(1, 90))
        loop.loop.submit(job)
        jobs.append(job)
        if rng.random() < 0.1:
            loop.loop.abort(rng.choice(jobs).key)
    for job in jobs:
        loop.until(lambda job=job: bool(loop.ends(job.key)))
        told = loop.tokens(job.key)
        assert told == toy_answer(job.prompt_ids, job.stopping.max_tokens)[: len(told)]
    assert loop.crash is None
    assert sum(cached(loop, job) for job in jobs if loop.of(job.key, SequenceStarted)) > 0
    loop.loop.check()
    assert loop.loop.load().kv_tokens_used == 0


def test_the_cache_has_a_budget_and_imported_kv_is_not_kept(loops) -> None:
    loop, decode = loops(**CACHING, prefix_tokens=128), loops(**CACHING)
    job = run(loop, work("a", prompt_ids=numbers(200)))
    run(loop, work("b", prompt_ids=numbers(200, 500)))
    assert loop.engine.cells_used == 128
    sink = Sink(loop.engine.spec.layout.slot_bytes, 4)
    remote = replace(job, key=SequenceKey(RequestId("remote"), 1), phase=Phase.PREFILL, sink=sink)
    loop.loop.submit(remote)
    loop.until(lambda: bool(loop.of(remote.key, NewTokens)))
    first = tuple(loop.tokens(remote.key))
    run(decode, replace(job, phase=Phase.DECODE, answer_ids=first, blocks=sink.blocks(200)))
    decode.is_idle()


def test_while_paused_nothing_is_computed_but_an_abort_takes_effect() -> None:
    """The bus is away, and the ring of what it has not acknowledged is full."""
    pausing = threading.Event()
    pausing.set()
    loop = Loop(ToyStepEngine(), started=False)
    loop.start(paused=pausing.is_set)
    stays, leaves = work("stays"), work("leaves")
    loop.loop.submit(stays)
    loop.loop.submit(leaves)
    loop.loop.abort(leaves.key)
    loop.until(lambda: bool(loop.of(leaves.key, SequenceAborted)))
    assert loop.engine.steps == 0
    pausing.clear()
    assert loop.finish(stays.key) is EndReason.LENGTH
    assert loop.tokens(stays.key) == toy_answer(stays.prompt_ids, 5)
    loop.loop.stop()


def handed_over(loops, name: str, length: int) -> SequenceWork:
    """The decode work of a prompt of `length` tokens, and the first token of its answer."""
    prefill = loops()
    sink = Sink(prefill.engine.spec.layout.slot_bytes, 8)
    job = work(name, prompt_ids=numbers(length))
    prefill.loop.submit(replace(job, phase=Phase.PREFILL, sink=sink))
    prefill.until(lambda: bool(prefill.of(job.key, NewTokens)))
    first = tuple(prefill.tokens(job.key))
    blocks = sink.blocks(length)
    return replace(job, phase=Phase.DECODE, answer_ids=first, blocks=blocks, keep=True)


def test_imported_kv_that_is_kept_is_pinned_and_only_the_rest_imported(loops) -> None:
    decode = loops(**CACHING)
    run(decode, handed_over(loops, "first", 200))
    second = handed_over(loops, "second", 200)
    pins = decode.loop.pins
    assert pins is not None
    prefix = Prefix.of("", "toy", second.prompt_ids, 64)
    assert pins.pin(second.key, prefix) == 3
    run(decode, replace(second, blocks=second.blocks[3:]))
    assert [*second.answer_ids, *decode.tokens(second.key)] == toy_answer(second.prompt_ids, 5)
    assert cached(decode, second) == 0
    decode.loop.check()


@pytest.mark.parametrize("gone", ["forgotten", "unpinned"])
def test_a_pinned_prefix_that_is_gone_fails_its_sequence(loops, gone: str) -> None:
    decode = loops(**CACHING)
    run(decode, handed_over(loops, "first", 200))
    second = handed_over(loops, "second", 200)
    pins = decode.loop.pins
    assert pins is not None
    assert pins.pin(second.key, Prefix.of("", "toy", second.prompt_ids, 64)) == 3
    if gone == "forgotten":
        assert decode.loop.forget("").result(timeout=60) == 1
    else:
        pins.unpin(second.key)
    decode.loop.submit(replace(second, blocks=second.blocks[3:]))
    failure = decode.failure(second.key)
    assert (failure.reason, failure.permanent) == ("unverified_kv", False)
    again = replace(second, key=SequenceKey(second.key.request_id, 2))
    run(decode, again)
    assert [*again.answer_ids, *decode.tokens(again.key)] == toy_answer(again.prompt_ids, 5)
    decode.loop.check()


def test_an_engine_without_a_cache_pins_nothing(loops) -> None:
    assert loops().loop.pins is None


def test_blocks_that_decode_has_are_handed_over_to_nobody_but_who_wants_them(loops) -> None:
    loop = loops()
    sink = Sink(loop.engine.spec.layout.slot_bytes, 8)
    job = work("leaves-out", prompt_ids=numbers(200))
    wanted = frozenset({0, 3})
    loop.loop.submit(replace(job, phase=Phase.PREFILL, sink=sink, held_blocks=2, wanted=wanted))
    loop.until(lambda: bool(loop.of(job.key, NewTokens)))
    assert sink.order == [0, 2, 3]

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from diptych_contracts.errors import Unverified
from diptych_contracts.ids import RequestId
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
    StepNews,
    StepReport,
)
from diptych_engine.step_loop import StepLoop
from diptych_testkit.small_fleet import NoStops
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

SIZE = 64
CACHING = {"prefix_sequences": 4, "prefix_tokens": 4096}
SEEDED = Sampling(temperature=1.0, seed=11)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Engine(ToyStepEngine):
    """Importing a block takes a millisecond; it refuses those it is told to."""

    def __init__(self, clock: Clock, **settings) -> None:
        super().__init__(**settings)
        self.clock = clock
        self.imported: list[tuple[int, int]] = []
        self.exported: list[tuple[int, int]] = []
        self.refused: set[int] = set()

    def import_block(self, seq: int, block: KvBlock) -> None:
        self.clock.now_s += 0.001
        if block.p0 in self.refused:
            raise Unverified(f"KV of {block.p0} is not what it should be")
        super().import_block(seq, block)
        self.imported.append((block.p0, block.p1))

    def export_block(self, seq: int, p0: int, p1: int, out: memoryview) -> int:
        self.exported.append((p0, p1))
        return super().export_block(seq, p0, p1, out)


class Loop(StepLoop):
    """A step loop whose turns are taken by hand."""

    def __init__(self, **settings) -> None:
        clock = Clock()
        self.engine = Engine(clock, **settings)
        super().__init__(self.engine, lambda _stopping: NoStops(), clock=clock)
        self.reports: list[StepReport] = []
        self._listener = self.reports.append

    def turn(self) -> bool:
        """One turn; gives whether it computed."""
        batch = self._begin_step()
        if batch is not None:
            self._end_step(batch)
        return batch is not None

    def to_the_end(self) -> None:
        while self._sequences or self._settled or self._aborts:
            self.turn()
        self.check()

    @property
    def news(self) -> list[StepNews]:
        return [news for report in self.reports for news in report.news]

    def tokens(self, key: SequenceKey) -> list[int]:
        told = [n for n in self.news if isinstance(n, NewTokens) and n.key == key]
        return [token for n in told for token in n.token_ids]

    def cached(self, key: SequenceKey) -> int:
        (started,) = (n for n in self.news if isinstance(n, SequenceStarted) and n.key == key)
        return started.cached_tokens

    @property
    def restored(self) -> int:
        return sum(r.restored.tokens for r in self.reports if r.restored is not None)

    @property
    def refused(self) -> int:
        return sum(r.restored.refused for r in self.reports if r.restored is not None)


class Sink:
    def __init__(self) -> None:
        self.slots: dict[int, bytearray] = {}
        self.data: dict[int, bytes] = {}

    def buffer(self, index: int) -> memoryview:
        self.slots[index] = bytearray(SIZE * 8)
        return memoryview(self.slots[index])

    def written(self, index: int, n_bytes: int) -> None:
        assert index not in self.data
        self.data[index] = bytes(self.slots[index][:n_bytes])


def numbers(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(1, 1000) for _ in range(count))


def work(name: str, prompt: Sequence[int], **changes) -> SequenceWork:
    return replace(
        SequenceWork(
            key=SequenceKey(RequestId(name), 1),
            phase=Phase.GENERATE,
            prompt_ids=prompt,
            answer_ids=(),
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=5, ignore_eos=True),
        ),
        **changes,
    )


def kept(prompt: Sequence[int], first: int = 0, last: int | None = None) -> tuple[KvBlock, ...]:
    """The full blocks [first, last) of `prompt`, as an engine exported them."""
    sink, loop = Sink(), Loop()
    loop.submit(work("maker", prompt, phase=Phase.PREFILL, sink=sink))
    loop.to_the_end()
    full = len(prompt) // SIZE
    return tuple(
        KvBlock(i * SIZE, (i + 1) * SIZE, memoryview(sink.data[i]).toreadonly())
        for i in range(first, full if last is None else last)
    )


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [65, 128, 129, 200, 400])
def test_restored_kv_gives_the_answer_that_computing_gives(length: int, sampling) -> None:
    prompt = numbers(length)
    blocks = kept(prompt, last=(length - 1) // SIZE)
    loop = Loop()
    job = work("r", prompt, restored=blocks, sampling=sampling)
    loop.submit(job)
    loop.to_the_end()
    assert loop.tokens(job.key) == toy_answer(prompt, 5, sampling=sampling)
    assert loop.cached(job.key) == len(blocks) * SIZE == loop.restored
    assert sum(r.restored.sequences for r in loop.reports if r.restored is not None) == 1
    assert loop.engine.tokens_computed == length - len(blocks) * SIZE + 4
    assert loop.engine.cells_used == 0


def test_the_last_known_token_is_computed_although_its_block_was_kept() -> None:
    prompt = numbers(128)
    loop = Loop()
    job = work("r", prompt, restored=kept(prompt))
    loop.submit(job)
    loop.to_the_end()
    assert loop.cached(job.key) == 64
    assert loop.tokens(job.key) == toy_answer(prompt, 5)


def test_only_blocks_beyond_the_cached_prefix_are_imported() -> None:
    prompt = numbers(300)
    loop = Loop(**CACHING)
    loop.submit(work("before", prompt[:150]))
    loop.to_the_end()
    job = work("r", prompt, restored=kept(prompt))
    loop.submit(job)
    loop.to_the_end()
    assert loop.engine.imported == [(128, 192), (192, 256)]
    assert loop.cached(job.key) == 256
    assert loop.tokens(job.key) == toy_answer(prompt, 5)


def test_a_cached_prefix_as_long_as_what_was_kept_imports_nothing() -> None:
    prompt, gone = numbers(300), []
    loop = Loop(**CACHING)
    loop.submit(work("before", prompt))
    loop.to_the_end()
    blocks = kept(prompt, last=2)
    job = work("r", prompt, restored=blocks, on_imported=lambda: gone.append(1))
    loop.submit(job)
    loop.to_the_end()
    assert loop.engine.imported == []
    assert loop.cached(job.key) == 256
    assert gone == [1]


def test_blocks_that_begin_behind_the_cached_prefix_are_of_use_only_with_it() -> None:
    prompt = numbers(300)
    blocks = kept(prompt, first=2)
    loop = Loop(**CACHING)
    cold = work("cold", prompt, restored=blocks)
    loop.submit(cold)
    loop.to_the_end()
    assert (loop.cached(cold.key), loop.engine.imported) == (0, [])
    other = Loop(**CACHING)
    other.submit(work("before", prompt[:130]))
    other.to_the_end()
    warm = work("warm", prompt, restored=blocks)
    other.submit(warm)
    other.to_the_end()
    assert other.cached(warm.key) == 256
    assert loop.tokens(cold.key) == other.tokens(warm.key) == toy_answer(prompt, 5)


@pytest.mark.parametrize("bad", [0, 64, 192])
def test_kv_the_engine_refuses_is_computed_and_nothing_of_its_run_is_used(bad: int) -> None:
    prompt, sink, gone = numbers(300), Sink(), []
    loop = Loop()
    loop.engine.refused = {bad}
    job = work(
        "r",
        prompt,
        phase=Phase.PREFILL,
        sink=sink,
        restored=kept(prompt),
        on_imported=lambda: gone.append(1),
    )
    loop.submit(job)
    loop.to_the_end()
    assert not [n for n in loop.news if isinstance(n, SequenceFailed)]
    assert (loop.cached(job.key), loop.refused, gone) == (0, 1, [1])
    assert loop.tokens(job.key) == toy_answer(prompt, 1)
    assert loop.engine.exported == [(0, 64), (64, 128), (128, 192), (192, 256), (256, 300)]
    assert loop.engine.cells_used == 0


def test_a_refused_run_goes_back_to_what_the_prefix_cache_has() -> None:
    prompt = numbers(300)
    loop = Loop(**CACHING)
    loop.submit(work("before", prompt[:150]))
    loop.to_the_end()
    loop.engine.refused = {192}
    job = work("r", prompt, restored=kept(prompt))
    loop.submit(job)
    loop.to_the_end()
    assert loop.cached(job.key) == 128
    assert loop.tokens(job.key) == toy_answer(prompt, 5)


def test_a_prefill_hands_over_every_block_once_whoever_made_it() -> None:
    prompt, cold, warm = numbers(300), Sink(), Sink()
    maker = Loop()
    maker.submit(work("cold", prompt, phase=Phase.PREFILL, sink=cold))
    maker.to_the_end()
    loop = Loop(**CACHING)
    loop.submit(work("before", prompt[:100]))
    loop.to_the_end()
    blocks = kept(prompt, first=1, last=3)
    loop.submit(work("warm", prompt, phase=Phase.PREFILL, sink=warm, restored=blocks))
    loop.to_the_end()
    assert warm.data == cold.data
    assert list(warm.data) == [0, 1, 2, 3, 4]
    assert loop.engine.imported == [(64, 128), (128, 192)]
    assert loop.engine.exported == [(0, 64), (192, 256), (256, 300)]


def test_a_sink_that_fails_while_it_gets_restored_blocks_costs_its_sequence_only() -> None:
    class Broken(Sink):
        def written(self, index: int, n_bytes: int) -> None:
            raise Unverified("the link is gone")

    prompt = numbers(300)
    loop = Loop()
    job = work("r", prompt, phase=Phase.PREFILL, sink=Broken(), restored=kept(prompt))
    good = work("good", numbers(80, 1))
    loop.submit(job)
    loop.submit(good)
    loop.to_the_end()
    (failure,) = (n for n in loop.news if isinstance(n, SequenceFailed))
    assert failure.key == job.key
    assert "the link is gone" in failure.detail
    assert loop.tokens(good.key) == toy_answer(good.prompt_ids, 5)
    assert loop.engine.cells_used == 0


def test_others_go_on_while_a_long_prompt_is_restored() -> None:
    """Four blocks of a millisecond each between two steps; never all of them."""
    loop, prompt = Loop(kv_tokens=16_384), numbers(64 * 20 + 1)
    blocks = kept(prompt)
    answering = work("answering", numbers(50, 1), stopping=Stopping(max_tokens=50))
    loop.submit(answering)
    loop.turn()
    loop.submit(work("r", prompt, restored=blocks))
    for turn in range(1, 5):
        before = len(loop.tokens(answering.key))
        assert loop.turn()
        assert len(loop.tokens(answering.key)) == before + 1
        assert len(loop.engine.imported) == 4 * turn
    loop.to_the_end()
    assert loop.restored == 64 * 20


def test_a_sequence_that_waits_for_its_kv_can_be_aborted() -> None:
    loop, prompt = Loop(), numbers(64 * 20 + 1)
    job = work("r", prompt, restored=kept(prompt))
    loop.submit(job)
    loop.turn()
    assert loop.engine.cells_used
    loop.abort(job.key)
    loop.to_the_end()
    assert [n for n in loop.news if isinstance(n, SequenceAborted)] == [SequenceAborted(job.key)]
    assert not [n for n in loop.news if isinstance(n, SequenceStarted)]
    assert loop.engine.cells_used == 0
    loop.submit(work("next", numbers(80)))
    loop.to_the_end()


def test_a_recovered_answer_is_restored_too() -> None:
    prompt, answer = numbers(100), toy_answer(numbers(100), 60)
    loop = Loop()
    known = (*prompt, *answer[:40])
    job = work(
        "r",
        prompt,
        answer_ids=tuple(answer[:40]),
        restored=kept(known),
        stopping=Stopping(max_tokens=60, ignore_eos=True),
    )
    loop.submit(job)
    loop.to_the_end()
    assert loop.cached(job.key) == 128
    assert loop.tokens(job.key) == answer[40:]


def test_restored_kv_is_kept_as_a_prefix_like_computed_kv() -> None:
    prompt = numbers(300)
    loop = Loop(**CACHING)
    loop.submit(work("r", prompt, restored=kept(prompt)))
    loop.to_the_end()
    again = work("again", prompt)
    loop.submit(again)
    loop.to_the_end()
    assert loop.cached(again.key) == 256


@pytest.mark.parametrize(
    "spoil",
    [
        lambda blocks: blocks[::-1],
        lambda blocks: (blocks[0], blocks[2]),
        lambda blocks: (replace(blocks[0], p1=32),),
        lambda blocks: (replace(blocks[0], p0=64, p1=128),),
    ],
)
def test_what_is_no_run_of_full_blocks_is_left_alone(spoil) -> None:
    prompt = numbers(300)
    loop = Loop()
    job = work("r", prompt, restored=spoil(kept(prompt)))
    loop.submit(job)
    loop.to_the_end()
    assert loop.tokens(job.key) == toy_answer(prompt, 5)
    assert loop.cached(job.key) in (0, 64)


def test_work_that_goes_nowhere_writes_the_blocks_that_are_wanted() -> None:
    prompt, sink = numbers(300), Sink()
    loop = Loop(**CACHING)
    job = work("r", prompt, sink=sink, wanted={1, 3})
    loop.submit(job)
    loop.to_the_end()
    assert loop.tokens(job.key) == toy_answer(prompt, 5)
    everything = kept(prompt)
    assert sink.data == {i: bytes(everything[i].data) for i in (1, 3)}
    assert loop.engine.exported == [(64, 128), (192, 256)]


@pytest.mark.parametrize("seed", range(20))
def test_any_traffic_gives_the_same_answers_with_whatever_was_kept(seed: int) -> None:
    rng = Random(seed)
    loop = Loop(**CACHING, kv_tokens=2048, max_sequences=3)
    loop.engine.refused = set(rng.sample(range(0, 640, 64), 2)) if seed % 3 == 0 else set()
    stems = [numbers(64 * rng.randrange(1, 6), n) for n in range(3)]
    jobs = []
    for number in range(12):
        prompt = (*rng.choice(stems), *numbers(rng.randrange(1, 150), 100 + number))
        full = (len(prompt) - 1) // SIZE
        first = rng.randrange(full + 1)
        blocks = kept(prompt, first, rng.randrange(first, full + 1))
        jobs.append(work(f"{number}", prompt, restored=blocks))
        loop.submit(jobs[-1])
        for _ in range(rng.randrange(4)):
            loop.turn()
            loop.check()
    loop.to_the_end()
    for job in jobs:
        assert loop.tokens(job.key) == toy_answer(job.prompt_ids, 5)

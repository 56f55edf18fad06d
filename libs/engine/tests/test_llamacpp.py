"""Real weights: whatever the company, the chunks and the hand-off, the tokens are the same."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import Incompatible, Permanent, Unverified
from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.llamacpp import LlamaCppEngine, LlamaCppSettings
from diptych_engine.llamacpp import self_check as self_checking
from diptych_engine.port import (
    KvBlock,
    NewTokens,
    Phase,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceWork,
    StepInput,
    StepNews,
    StepReport,
)
from diptych_engine.step_loop import StepLoop
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

LENGTHS = (1, 63, 64, 65, 128, 200)
ANSWER_TOKENS = 12
SETTINGS = LlamaCppSettings(kv_tokens=2048, max_sequences=8, context_tokens=1024)
WAIT_S = 120.0
TEXT = """The lighthouse keeper wrote in his journal every evening. Le phare s'allume à la tombée de
la nuit, et la mer devient noire. Am Morgen kamen die Fischer zurück, müde, aber mit vollen Netzen.
He counted the ships: one, two, three, four, five; the sixth was late. def count(ships): return
sum(1 for ship in ships if ship.seen). On Sundays the priest came by boat, and they argued about the
weather, about the price of oil, and about whether a light that nobody sees is still a light. The
keeper thought it was. The priest said that a light is a promise, and that a promise needs two."""


def weights() -> Path:
    named = os.environ.get("DIPTYCH_TEST_GGUF")
    cached = "~/.cache/diptych/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    path = Path(named or cached).expanduser()
    if not path.is_file():
        pytest.fail(f"no weights at {path}: run `diptych models pull smollm2-135m`")
    return path


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return card_from_gguf(weights(), model="smollm2-135m")


@pytest.fixture(scope="module")
def codec(card: ModelCard) -> TextCodec:
    return TextCodec.from_card(card)


@pytest.fixture(scope="module")
def prompts(codec: TextCodec) -> dict[int, tuple[int, ...]]:
    ids = codec.encode(TEXT * 2)
    return {n: tuple(ids[n : 2 * n]) for n in LENGTHS}


@pytest.fixture(scope="module")
def bare(card: ModelCard) -> Iterator[LlamaCppEngine]:
    engine = LlamaCppEngine(weights(), card, SETTINGS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(bare: LlamaCppEngine, prompts: dict[int, tuple[int, ...]]) -> dict[int, list[int]]:
    """Greedy answers of one bare engine, one sequence at a time, each prompt in one go."""
    return {n: greedy(bare, prompt, ANSWER_TOKENS) for n, prompt in prompts.items()}


def greedy(
    engine: LlamaCppEngine, prompt: Sequence[int], count: int, chunk: int = 256
) -> list[int]:
    answer: list[int] = []
    for at in range(0, len(prompt), chunk):
        part = prompt[at : at + chunk]
        row = engine.step([StepInput(0, at, part, want_logits=True)])[0]
    while len(answer) < count:
        assert row is not None
        answer.append(int(row.argmax()))
        at = len(prompt) + len(answer) - 1
        row = engine.step([StepInput(0, at, answer[-1:], want_logits=True)])[0]
    engine.drop(0)
    return answer


class Worker:
    """A step loop on real weights, and what it said."""

    def __init__(self, card: ModelCard, codec: TextCodec) -> None:
        engine = LlamaCppEngine(weights(), card, replace(SETTINGS, threads=2))
        self.loop = StepLoop(engine, lambda stopping: AnswerText(codec, stopping.stop))
        self.news: list[StepNews] = []
        self._heard = threading.Condition()
        self.loop.start(self._listen)

    def _listen(self, report: StepReport) -> None:
        with self._heard:
            self.news += report.news
            self._heard.notify_all()

    def wait(self, key: SequenceKey, *, prefill: bool = False) -> list[int]:
        def done() -> bool:
            return any(
                isinstance(n, SequenceFailed | SequenceAborted)
                or (isinstance(n, NewTokens) and (prefill or n.finish))
                for n in self.news
                if n.key == key
            )

        with self._heard:
            assert self._heard.wait_for(done, WAIT_S)
            mine = [n for n in self.news if isinstance(n, NewTokens) and n.key == key]
        return [t for n in mine for t in n.token_ids]

    def failure(self, key: SequenceKey) -> SequenceFailed:
        self.wait(key)
        return next(n for n in self.news if isinstance(n, SequenceFailed) and n.key == key)

    def is_idle(self) -> bool:
        self.loop.check()
        return self.loop.load().kv_tokens_used == 0


@pytest.fixture(scope="module")
def workers(card: ModelCard, codec: TextCodec) -> Iterator[tuple[Worker, Worker]]:
    made: list[Worker] = []
    try:
        made += [Worker(card, codec)]
        made += [Worker(card, codec)]
        yield made[0], made[1]
    finally:
        for worker in made:
            worker.loop.stop()


class Slots:
    """A sink in memory."""

    def __init__(self, slot_bytes: int, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self._slots = [bytearray(slot_bytes) for _ in range(-(-n_tokens // 64))]
        self._sizes: list[int] = []

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._slots[index])

    def written(self, index: int, n_bytes: int) -> None:
        assert index == len(self._sizes)
        self._sizes.append(n_bytes)

    def blocks(self) -> tuple[KvBlock, ...]:
        return tuple(
            KvBlock(
                64 * i,
                min(64 * i + 64, self._n_tokens),
                memoryview(self._slots[i])[:size].toreadonly(),
            )
            for i, size in enumerate(self._sizes)
        )


def work(name: str, prompt: Sequence[int], **changes: object) -> SequenceWork:
    max_tokens = changes.pop("max_tokens", ANSWER_TOKENS)
    base = SequenceWork(
        key=SequenceKey(RequestId(name), 1),
        phase=Phase.GENERATE,
        prompt_ids=prompt,
        answer_ids=(),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
    )
    return replace(base, **changes)


def hand_over(prefill: Worker, job: SequenceWork) -> SequenceWork:
    """Run the prefill phase of `job`; gives the decode phase's work."""
    known = len(job.prompt_ids) + len(job.answer_ids)
    slots = Slots(prefill.loop.spec.layout.slot_bytes, known)
    key = SequenceKey(RequestId(f"{job.key.request_id}.prefill"), 1)
    prefill.loop.submit(replace(job, key=key, phase=Phase.PREFILL, sink=slots))
    first = prefill.wait(key, prefill=True)
    answer = (*job.answer_ids, *first)
    return replace(job, phase=Phase.DECODE, answer_ids=answer, blocks=slots.blocks())


def test_chunks_do_not_change_the_answer(bare, prompts, expected) -> None:
    for chunk in (48, 100):
        assert greedy(bare, prompts[200], ANSWER_TOKENS, chunk) == expected[200]


def test_company_does_not_change_the_answer(workers, prompts, expected) -> None:
    jobs = {n: work(f"crowd{n}", prompt) for n, prompt in prompts.items()}
    for job in jobs.values():
        workers[0].loop.submit(job)
    assert {n: workers[0].wait(job.key) for n, job in jobs.items()} == expected
    assert workers[0].is_idle()


def test_handing_over_does_not_change_the_answer(workers, prompts, expected) -> None:
    prefill, decode = workers
    busy = work("busy", prompts[63], max_tokens=400)
    decode.loop.submit(busy)
    jobs = {n: hand_over(prefill, work(f"remote{n}", prompts[n])) for n in LENGTHS}
    for job in jobs.values():
        decode.loop.submit(job)
    answers = {n: [*job.answer_ids, *decode.wait(job.key)] for n, job in jobs.items()}
    assert answers == expected
    decode.loop.abort(busy.key)
    decode.wait(busy.key)
    assert prefill.is_idle()
    assert decode.is_idle()


def test_a_recovery_goes_on_with_the_very_same_answer(workers, prompts, expected) -> None:
    prefill, decode = workers
    for n, prefix in ((65, 5), (200, 9)):
        job = work(f"again{n}", prompts[n], answer_ids=tuple(expected[n][:prefix]))
        remote = hand_over(prefill, replace(job, key=SequenceKey(RequestId(f"far{n}"), 2)))
        decode.loop.submit(job)
        decode.loop.submit(remote)
        assert [*job.answer_ids, *decode.wait(job.key)] == expected[n]
        assert [*remote.answer_ids, *decode.wait(remote.key)] == expected[n]


def test_a_seed_gives_the_same_answer_in_any_company(workers, prompts) -> None:
    alone, crowded = workers
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=2026, frequency_penalty=0.2)
    job = work("seeded", prompts[65], sampling=sampling)
    alone.loop.submit(job)
    others = [work(f"other{n}", prompts[n]) for n in (1, 63)]
    for other in (*others, job):
        crowded.loop.submit(other)
    assert alone.wait(job.key) == crowded.wait(job.key)
    for other in others:
        crowded.wait(other.key)


def test_an_abort_frees_the_sequence(workers, prompts) -> None:
    worker = workers[1]
    job = work("aborted", prompts[200], max_tokens=500)
    worker.loop.submit(job)
    worker.loop.abort(job.key)
    worker.wait(job.key)
    assert worker.is_idle()


def test_altered_kv_is_refused_and_nothing_is_left_of_it(workers, prompts, expected) -> None:
    prefill, decode = workers
    job = hand_over(prefill, work("altered", prompts[128]))
    first, second = job.blocks
    header = bytearray(second.data)
    header[0] ^= 0xFF
    for name, blocks in {
        "cut": (first, replace(second, data=second.data[:-1])),
        "header": (first, replace(second, data=memoryview(header))),
        "swapped": (replace(first, data=second.data), second),
        "missing": (first,),
    }.items():
        key = SequenceKey(RequestId(f"altered-{name}"), 1)
        decode.loop.submit(replace(job, key=key, blocks=blocks))
        assert decode.failure(key).reason == "unverified_kv"
    assert decode.is_idle()
    decode.loop.submit(job)
    assert [*job.answer_ids, *decode.wait(job.key)] == expected[128]


def test_a_slot_holds_exactly_one_full_block(bare, prompts) -> None:
    bare.step([StepInput(0, 0, prompts[65], want_logits=False)])
    slot_bytes = bare.spec.layout.slot_bytes
    out = memoryview(bytearray(slot_bytes))
    assert bare.export_block(0, 0, 64, out) == slot_bytes
    assert bare.export_block(0, 64, 65, out) < slot_bytes / 60
    with pytest.raises(ValueError, match="does not fit"):
        bare.export_block(0, 0, 64, out[:-1])
    with pytest.raises(ValueError, match="does not hold"):
        bare.export_block(0, 64, 66, out)
    with pytest.raises(Unverified, match="expected"):
        bare.import_block(1, KvBlock(0, 64, out[:100]))
    bare.drop(0)


def test_imported_kv_gives_bit_equal_logits(bare, prompts) -> None:
    prompt = prompts[65]
    slot = memoryview(bytearray(bare.spec.layout.slot_bytes))
    bare.step([StepInput(0, 0, prompt[:64], want_logits=False)])
    bare.export_block(0, 0, 64, slot)
    bare.import_block(5, KvBlock(0, 64, slot))
    rows = bare.step([StepInput(s, 64, prompt[64:], want_logits=True) for s in (0, 5)])
    assert rows[0] is not None
    np.testing.assert_array_equal(rows[0], rows[1])
    bare.drop(0)
    bare.drop(5)


def test_a_wrong_file_is_one_clear_line(card, tmp_path) -> None:
    with pytest.raises(Permanent, match="no model file at"):
        LlamaCppEngine(tmp_path / "none.gguf", card, SETTINGS)
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"not a model" * 100)
    with pytest.raises(Permanent, match=r"wrong\.gguf is not a model llama\.cpp can load: .+"):
        LlamaCppEngine(wrong, card, SETTINGS)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(weights().read_bytes()[:50_000_000])
    with pytest.raises(Permanent, match=r"cut\.gguf is not a model"):
        LlamaCppEngine(cut, card, SETTINGS)


def test_what_does_not_belong_together_is_said(card, tmp_path, monkeypatch) -> None:
    with pytest.raises(Permanent, match="kv_tokens=512 cannot hold one sequence of 1024 tokens"):
        LlamaCppEngine(weights(), card, replace(SETTINGS, kv_tokens=512))
    with pytest.raises(Incompatible, match=r"vocab_size: the model card says 7, .+ has 49152"):
        LlamaCppEngine(weights(), replace_card(card, vocab_size=7), SETTINGS)
    with pytest.raises(Permanent, match=r"cannot load llama\.cpp from .*none\.so"):
        LlamaCppEngine(weights(), card, replace(SETTINGS, library=tmp_path / "none.so"))
    other = self_checking.SMOLLM2_135M_Q4_1._replace(answer_ids=(1,) * 8)
    monkeypatch.setattr(self_checking, "KNOWN", (other,))
    with pytest.raises(Incompatible, match=r"self-check of .+ expected \(1, 1, .+ decoded \(38,"):
        LlamaCppEngine(weights(), card, SETTINGS)


def replace_card(card: ModelCard, *, vocab_size: int) -> ModelCard:
    fields = {name: getattr(card, name) for name in card.__struct_fields__}
    return ModelCard(**{**fields, "vocab_size": vocab_size})

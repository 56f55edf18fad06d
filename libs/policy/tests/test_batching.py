from random import Random

import pytest

from diptych_policy.batching import Batcher, BatchLimits, Chunk


def batcher(
    *,
    kv_tokens: int = 1000,
    max_sequences: int = 4,
    step_tokens: int = 128,
    prefill_tokens: int = 64,
) -> Batcher[str]:
    return Batcher(
        BatchLimits(
            kv_tokens=kv_tokens,
            max_sequences=max_sequences,
            block_tokens=64,
            step_tokens=step_tokens,
            prefill_tokens=prefill_tokens,
        )
    )


def run(subject: Batcher[str], chunks: list[Chunk[str]]) -> None:
    for chunk in chunks:
        subject.advance(chunk.key, chunk.end, sampled=int(chunk.last))
    subject.check()


def chunk_ends(subject: Batcher[str], key: str) -> list[int]:
    ends: list[int] = []
    while True:
        chunks = subject.plan()
        ends += [c.end for c in chunks if c.key == key]
        run(subject, chunks)
        if any(c.key == key and c.last for c in chunks):
            return ends


def test_nobody_runs_so_nothing_is_planned() -> None:
    assert batcher().admit() == []
    assert batcher().plan() == []


def test_a_prompt_is_filled_block_by_block_and_then_decodes() -> None:
    subject = batcher()
    subject.add("a", known=150, cells=200)
    assert subject.admit() == [("a", 0)]
    assert chunk_ends(subject, "a") == [64, 128, 150]
    assert subject.plan() == [Chunk("a", 150, 151, last=True)]


def test_decoding_sequences_go_first_and_fills_take_the_rest() -> None:
    subject = batcher(step_tokens=40, max_sequences=4)
    for key in "ab":
        subject.add(key, known=1, cells=50)
    subject.admit()
    run(subject, subject.plan())
    subject.add("long", known=300, cells=300)
    subject.admit()
    assert subject.plan() == [
        Chunk("a", 1, 2, last=True),
        Chunk("b", 1, 2, last=True),
        Chunk("long", 0, 38, last=False),
    ]


def test_what_one_fill_leaves_goes_to_the_next() -> None:
    subject = batcher()
    subject.add("a", known=20, cells=20)
    subject.add("b", known=100, cells=100)
    subject.admit()
    assert subject.plan() == [Chunk("a", 0, 20, last=True), Chunk("b", 0, 44, last=False)]


def test_a_chunk_ends_at_a_block_edge_unless_that_wastes_half_of_it() -> None:
    wide = batcher(prefill_tokens=100)
    wide.add("a", known=300, cells=300)
    wide.admit()
    assert chunk_ends(wide, "a") == [64, 128, 192, 256, 300]
    narrow = batcher(prefill_tokens=40)
    narrow.add("a", known=100, cells=100)
    narrow.admit()
    assert chunk_ends(narrow, "a") == [40, 64, 100]


def test_imported_tokens_are_not_filled_again() -> None:
    subject = batcher()
    subject.add("a", known=101, cells=200, computed=100)
    assert subject.tokens_to_fill == 0
    subject.admit()
    assert subject.plan() == [Chunk("a", 100, 101, last=True)]


def test_the_head_waits_for_room_and_is_not_overtaken() -> None:
    subject = batcher(kv_tokens=100)
    subject.add("a", known=10, cells=60)
    subject.add("big", known=10, cells=50)
    subject.add("small", known=10, cells=10)
    assert [key for key, _ in subject.admit()] == ["a"]
    assert (subject.running, subject.waiting, subject.promised_cells) == (1, 2, 120)
    subject.remove("a")
    assert [key for key, _ in subject.admit()] == ["big", "small"]


def test_an_interrupted_answer_goes_before_those_that_wait_for_their_first_token() -> None:
    subject = batcher(max_sequences=2)
    subject.add("filling", known=100, cells=120)
    subject.admit()
    subject.add("new", known=10, cells=20)
    subject.add("interrupted", known=30, cells=40, interrupted=True)
    subject.add("later", known=30, cells=40, interrupted=True)
    assert [key for key, _ in subject.admit()] == ["interrupted"]
    assert [chunk.key for chunk in subject.plan()] == ["interrupted", "filling"]
    subject.remove("interrupted")
    assert [key for key, _ in subject.admit()] == ["later"]
    subject.check()


def test_sequence_ids_are_bounded_and_come_back() -> None:
    subject = batcher(max_sequences=2)
    for key in "abc":
        subject.add(key, known=1, cells=1)
    assert subject.admit() == [("a", 0), ("b", 1)]
    assert subject.remove("b") == 1
    assert subject.remove("a") == 0
    assert subject.admit() == [("c", 0)]
    subject.check()


def test_removing_one_that_waits_frees_its_promise() -> None:
    subject = batcher()
    subject.add("a", known=5, cells=100)
    assert subject.tokens_to_fill == 5
    assert subject.remove("a") is None
    assert (subject.promised_cells, subject.tokens_to_fill, "a" in subject) == (0, 0, False)


@pytest.mark.parametrize(
    ("known", "cells", "computed"), [(0, 10, 0), (11, 10, 0), (5, 1001, 0), (5, 10, 5)]
)
def test_what_can_never_run_is_refused(known: int, cells: int, computed: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        batcher().add("a", known=known, cells=cells, computed=computed)


def test_a_key_is_there_once() -> None:
    subject = batcher()
    subject.add("a", known=1, cells=1)
    with pytest.raises(ValueError, match="already"):
        subject.add("a", known=1, cells=1)


def test_check_finds_a_broken_invariant() -> None:
    subject = batcher()
    subject.add("a", known=1, cells=1)
    subject.admit()
    subject.advance("a", 1, sampled=9)
    with pytest.raises(AssertionError, match="known within promised"):
        subject.check()


@pytest.mark.parametrize("seed", range(20))
def test_everything_ends_whatever_comes(seed: int) -> None:
    rng = Random(seed)
    subject = batcher(kv_tokens=400, max_sequences=3, step_tokens=70)
    to_do = {f"s{i}": rng.randint(1, 200) for i in range(12)}
    lengths = {key: known + rng.randint(0, 20) for key, known in to_do.items()}
    order: list[str] = []
    for key, known in to_do.items():
        subject.add(key, known=known, cells=lengths[key])
    for _ in range(2000):
        order += [key for key, _ in subject.admit()]
        chunks = subject.plan()
        assert sum(c.end - c.start for c in chunks) <= 70
        run(subject, chunks)
        for chunk in chunks:
            if chunk.end == lengths[chunk.key] or rng.random() < 0.01:
                subject.remove(chunk.key)
        subject.check()
        if not subject.running and not subject.waiting:
            break
    assert order == list(to_do)
    assert subject.promised_cells == 0


def test_a_sequence_that_is_held_computes_nothing_and_goes_on_from_what_it_was_given() -> None:
    subject = batcher()
    for key in "ab":
        subject.add(key, known=150, cells=200)
    subject.admit()
    subject.hold("a")
    assert [chunk.key for chunk in subject.plan()] == ["b"]
    subject.remove("b")
    assert subject.plan() == []
    subject.go_on("a", 128)
    assert subject.plan() == [Chunk("a", 128, 150, last=True)]
    subject.check()


def test_a_held_sequence_that_lacks_one_token_only_does_not_decode() -> None:
    subject = batcher()
    subject.add("a", known=1, cells=50)
    subject.admit()
    subject.hold("a")
    assert subject.plan() == []
    subject.remove("a")
    subject.check()

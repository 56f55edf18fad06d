from random import Random

import pytest

from diptych_engine.llamacpp.placement import (
    Leaving,
    NoCellAbove,
    OutOfFillers,
    Placement,
    Span,
    Want,
)


class Cache:
    """Puts tokens where llama.cpp does: into the lowest free cells from its head on."""

    def __init__(self, size: int) -> None:
        self.cells: list[dict[int, int]] = [{} for _ in range(size)]
        self.head = 0

    def put(self, tokens: list[tuple[int, int]]) -> None:
        free = [i for i, held in enumerate(self.cells) if not held]
        order = [i for i in free if i >= self.head] + [i for i in free if i < self.head]
        for (seq, position), cell in zip(tokens, order, strict=False):
            self.cells[cell] = {seq: position}
            self.head = cell + 1

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        for held in self.cells:
            if p0 <= held.get(src, -1) < p1:
                held[dst] = held[src]

    def remove(self, seq: int, p0: int = 0, p1: int = 10**6) -> None:
        for cell, held in enumerate(self.cells):
            if p0 <= held.get(seq, -1) < p1:
                del held[seq]
                if not held:
                    self.head = min(self.head, cell)

    def of(self, seq: int) -> list[int]:
        """Positions of a sequence, in the order of its cells."""
        return [held[seq] for held in self.cells if seq in held]


class Driven:
    """A placement whose orders are carried out."""

    def __init__(self, size: int, fillers: int = 8) -> None:
        self.books = Placement(size, range(9000, 9000 + fillers))
        self.cache = Cache(size)

    def add(self, *wants: tuple[int, int]) -> None:
        asked = [Want(*want) for want in wants]
        tokens = [(seq, self.books.length(seq) + n) for seq, count in asked for n in range(count)]
        planned = self.books.plan(asked)
        for span in self.books.take(asked, planned):
            self.cache.remove(*span)
        cells = [cell for run in planned for cell in run]
        self.cache.put([token for _, token in sorted(zip(cells, tokens, strict=True))])
        self.agree()

    def fork(self, src: int, dst: int, p0: int, p1: int) -> bool:
        joined = self.books.join(src, dst, p0, p1)
        if joined:
            self.cache.copy(src, dst, p0, p1)
        self.agree()
        return joined

    def drop(self, seq: int) -> Leaving:
        leaving = self.books.leave(seq)
        for span in leaving.spans:
            assert leaving.filler is not None
            self.cache.copy(seq, leaving.filler, span.p0, span.p1)
        self.cache.remove(seq)
        for span in self.books.trim():
            self.cache.remove(*span)
        self.agree()
        return leaving

    def agree(self) -> None:
        self.books.check()
        for seq, cells in self.books.sequences.items():
            assert self.cache.of(seq) == list(range(len(cells)))
            assert [self.cache.cells[cell][seq] for cell in cells] == list(range(len(cells)))


def test_growing_sequences_interleave_in_order() -> None:
    driven = Driven(20)
    driven.add((0, 4), (1, 3))
    for _ in range(3):
        driven.add((1, 1), (0, 1))
    assert driven.books.sequences == {0: [0, 1, 2, 3, 8, 10, 12], 1: [4, 5, 6, 7, 9, 11]}


def test_freed_cells_below_a_sequence_are_not_given_to_it() -> None:
    """What llama.cpp does by itself: the freed cells are the lowest."""
    driven = Driven(20)
    driven.add((0, 6))
    driven.add((1, 4))
    assert driven.drop(0) == Leaving(9007, (Span(0, 0, 6),))
    driven.add((1, 4))
    assert driven.books.sequences[1] == [*range(6, 14)]
    driven.add((2, 8))
    assert driven.books.sequences[2] == [*range(6), 14, 15]


def test_a_batch_may_fill_holes_and_go_beyond_the_top() -> None:
    driven = Driven(20)
    driven.add((0, 2), (1, 2), (2, 2))
    driven.drop(1)
    driven.add((2, 3), (0, 3), (3, 1))
    assert driven.books.sequences == {0: [0, 1, 2, 3, 9], 2: [4, 5, 6, 7, 8], 3: [10]}


def test_what_lies_at_the_top_is_really_freed() -> None:
    driven = Driven(10)
    driven.add((0, 4))
    driven.add((1, 4))
    driven.drop(0)
    driven.drop(1)
    driven.add((2, 10))
    assert driven.books.sequences == {2: list(range(10))}


def test_shared_cells_stay_until_their_last_holder_leaves() -> None:
    driven = Driven(20)
    driven.add((0, 8))
    assert driven.fork(0, 1, 0, 6)
    driven.add((1, 2), (2, 1))
    assert driven.drop(0).spans == (Span(0, 6, 8),)
    driven.drop(2)
    driven.add((3, 3))
    assert driven.books.sequences == {1: [0, 1, 2, 3, 4, 5, 8, 9], 3: [6, 7, 10]}


def test_cells_that_do_not_lie_behind_are_not_joined() -> None:
    driven = Driven(20)
    driven.add((0, 4))
    driven.add((1, 8))
    assert driven.fork(1, 2, 0, 2)
    assert not driven.fork(0, 2, 2, 4)
    assert driven.fork(1, 2, 2, 4)


def test_a_sequence_with_no_cell_behind_it_must_move() -> None:
    driven = Driven(10)
    driven.add((0, 6))
    driven.add((1, 4))
    driven.drop(0)
    with pytest.raises(NoCellAbove) as caught:
        driven.add((2, 1), (1, 1))
    assert caught.value.seq == 1
    driven.agree()


def test_out_of_fillers_nothing_is_changed() -> None:
    driven = Driven(10, fillers=1)
    driven.add((0, 2))
    driven.add((1, 2))
    driven.add((2, 2))
    driven.drop(0)
    with pytest.raises(OutOfFillers):
        driven.books.leave(1)
    driven.agree()
    driven.add((3, 2))
    driven.drop(1)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_every_sequence_lies_in_order(seed: int) -> None:
    rng = Random(seed)
    driven = Driven(60, fillers=12)
    live: list[int] = []
    for number in range(300):
        choice = rng.random()
        if choice < 0.15:
            live.append(number)
            wants = [(number, rng.randint(1, 12))]
        elif choice < 0.3 and live:
            seq = rng.choice(live)
            live.remove(seq)
            driven.drop(seq) if driven.books.length(seq) else None
            continue
        elif choice < 0.4 and live and driven.books.length(live[0]) > 1:
            assert driven.fork(live[0], 1000 + number, 0, driven.books.length(live[0]) - 1)
            live.append(1000 + number)
            continue
        else:
            wants = [(seq, rng.randint(1, 2)) for seq in rng.sample(live, min(3, len(live)))]
        try:
            driven.add(*wants)
        except NoCellAbove as moved:
            if moved.seq in live:
                live.remove(moved.seq)
            driven.drop(moved.seq)
    for seq in live:
        driven.drop(seq)
    assert driven.books.sequences == {}
    assert all(not held for held in driven.cache.cells)

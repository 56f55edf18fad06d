"""Which KV cell each token goes to.

Attention sums over cells in the cells' order, and sums round. A sequence whose later tokens lie in
lower cells, which happens to any of them once cells have been freed, gets other logits (off by 0.36
in SmolLM2-135M, enough to change a greedy answer). So every sequence must lie in ascending cells.

llama.cpp cannot be told where to put a token: it takes the lowest free cells. So no cell is ever
free below the top but those that are wanted: what nobody needs is held by *fillers*, sequences that
are never computed, and is released cell by cell just before a batch. A sequence that leaves turns
into a filler, which costs nothing. This module only keeps the books; `engine` does the calls.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """Positions [p0, p1) of a sequence."""

    seq: int
    p0: int
    p1: int


class Want(NamedTuple):
    """More tokens for a sequence."""

    seq: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A sequence that goes: `spans` of it, which nobody shares, become `filler`'s."""

    filler: int | None
    spans: tuple[Span, ...]


class NoCellAbove(Exception):
    """A sequence has no free cells behind its last one."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"no free cells behind the last one of sequence {seq}")
        self.seq = seq


class OutOfFillers(Exception):
    """Every filler id is in use."""


class Placement:
    """The books of one cache.

    Args:
        size: Cells in all.
        fillers: Sequence ids for fillers.
    """

    def __init__(self, size: int, fillers: Iterable[int]) -> None:
        self._size = size
        self._fillers = tuple(fillers)
        self.reset()

    def reset(self) -> None:
        """Nothing is held."""
        self._cells: dict[int, list[int]] = {}
        self._holders: dict[int, int] = {}
        self._free_fillers = list(self._fillers)
        self._filled: dict[int, tuple[int, int]] = {}
        self._filled_cells: list[int] = []
        self._left: dict[int, int] = {}
        self._top = 0

    @property
    def sequences(self) -> dict[int, list[int]]:
        """The cells of each sequence, by position."""
        return self._cells

    def length(self, seq: int) -> int:
        """Tokens a sequence has."""
        return len(self._cells.get(seq, ()))

    def plan(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want the lowest free cells behind its sequence's last one.

        Raises:
            NoCellAbove: a sequence must move first.
        """
        free, top = list(self._filled_cells), self._top
        planned: list[list[int]] = []
        for seq, count in wants:
            held = self._cells.get(seq)
            at = bisect_right(free, held[-1]) if held else 0
            cells = free[at : at + count]
            del free[at : at + count]
            beyond = count - len(cells)
            if top + beyond > self._size:
                raise NoCellAbove(seq)
            cells += range(top, top + beyond)
            top += beyond
            planned.append(cells)
        return planned

    def take(self, wants: Sequence[Want], planned: Sequence[Sequence[int]]) -> list[Span]:
        """Book what `plan` gave; gives what to remove, so that just these cells are free."""
        released: list[tuple[int, int]] = []
        for (seq, _), cells in zip(wants, planned, strict=True):
            self._cells.setdefault(seq, []).extend(cells)
            for cell in cells:
                self._holders[cell] = 1
                if cell >= self._top:
                    self._top = cell + 1
                else:
                    released.append(self._unfill(cell))
        return _merged(released)

    def join(self, src: int, dst: int, p0: int, p1: int) -> bool:
        """Let `dst` share the cells of `src` at [p0, p1); False if its own lie behind them."""
        cells = self._cells[src][p0:p1]
        own = self._cells.setdefault(dst, [])
        if own and own[-1] > cells[0]:
            return False
        own += cells
        for cell in cells:
            self._holders[cell] += 1
        return True

    def shorten(self, seq: int, length: int) -> None:
        """Take back a sequence's last cells, which are free: holes until all is packed."""
        for cell in self._cells[seq][length:]:
            self._holders[cell] -= 1
        del self._cells[seq][length:]

    def shared_beginnings(self) -> list[tuple[int, tuple[int | None, int]]]:
        """Each sequence, with one named before it that shares most of its first cells."""
        found: list[tuple[int, tuple[int | None, int]]] = []
        for seq, cells in self._cells.items():
            counts = [(_common(cells, self._cells[other]), other) for other, _ in found]
            count, like = max(counts, default=(0, -1))
            found.append((seq, (like if count else None, count)))
        return found

    def leave(self, seq: int) -> Leaving:
        """Forget a sequence; what only it held becomes a filler's.

        Raises:
            OutOfFillers: nothing has changed.
        """
        cells = self._cells.get(seq, [])
        alone = [(p, cell) for p, cell in enumerate(cells) if self._holders[cell] == 1]
        if alone and not self._free_fillers:
            raise OutOfFillers
        self._cells.pop(seq, None)
        for cell in cells:
            self._holders[cell] -= 1
        if not alone:
            return Leaving(None, ())
        filler = self._free_fillers.pop()
        self._left[filler] = len(alone)
        for position, cell in alone:
            self._filled[cell] = (filler, position)
            insort(self._filled_cells, cell)
        spans = _merged([(seq, position) for position, _ in alone])
        return Leaving(filler, tuple(spans))

    def trim(self) -> list[Span]:
        """Lower the top below fillers; gives their spans to remove."""
        released: list[tuple[int, int]] = []
        while self._top - 1 in self._filled:
            self._top -= 1
            released.append(self._unfill(self._top))
        return _merged(released)

    def _unfill(self, cell: int) -> tuple[int, int]:
        filler, position = self._filled.pop(cell)
        del self._filled_cells[bisect_right(self._filled_cells, cell) - 1]
        self._left[filler] -= 1
        if self._left[filler] == 0:
            del self._left[filler]
            self._free_fillers.append(filler)
        return filler, position

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        holders: dict[int, int] = {}
        for cells in self._cells.values():
            _require(all(a < b for a, b in pairwise(cells)), "ascending cells")
            for cell in cells:
                holders[cell] = holders.get(cell, 0) + 1
        _require(holders == {c: n for c, n in self._holders.items() if n}, "holders counted")
        _require(sorted(self._filled) == self._filled_cells, "fillers in order")
        _require(not holders.keys() & self._filled.keys(), "a cell is held or filled")
        _require(
            holders.keys() | self._filled.keys() == set(range(self._top)), "no hole below the top"
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _merged(places: list[tuple[int, int]]) -> list[Span]:
    spans: list[Span] = []
    for seq, position in sorted(places):
        if spans and spans[-1].seq == seq and spans[-1].p1 == position:
            spans[-1] = Span(seq, spans[-1].p0, position + 1)
        else:
            spans.append(Span(seq, position, position + 1))
    return spans


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"placement: broken invariant: {what}")

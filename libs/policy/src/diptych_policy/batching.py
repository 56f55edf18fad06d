"""Which tokens an engine computes next: continuous batching with chunked prefill.

A sequence waits, runs (holding a sequence id), and leaves:

    add ──▶ waiting ──admit──▶ running (fill, then one token per step) ──remove──▶ gone

Rules:

1. Admission is first come, first served: the head waits for a sequence id and for KV room for its
   full length, and nobody overtakes it. So a long prompt is never starved by short ones. Only an
   interrupted answer, whose reader has tokens already and sees no more, goes before those that
   wait for their first; a request is interrupted a few times at most (`recovery`), so all get on.
2. KV room is promised from `add` on, at full length, so a running sequence never lacks a cell.
3. A step takes one token of every sequence that decodes. What is left of the step, up to
   `prefill_tokens`, goes to fills: interrupted answers first, then in order of admission.
4. A chunk ends at a block's edge where that costs at most half of it: blocks become final early,
   and can be sent while the next chunk computes.
5. A sequence that is held has its place, and no chunk: something else gives it KV first.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one engine holds, and what one step may take."""

    kv_tokens: int
    """KV cells in all."""
    max_sequences: int
    block_tokens: int
    step_tokens: int
    """Most tokens in one step; at least `max_sequences`."""
    prefill_tokens: int
    """Most of them that may fill prompts: the step's length is everybody's wait for a token."""
    draft_tokens: int = 0
    """Most tokens that a step may add to a sequence beside the one that it samples."""


class Chunk(NamedTuple, Generic[K]):
    """Positions [start, end) of one sequence, to be computed in the next step."""

    key: K
    start: int
    end: int
    last: bool
    """Whether the sequence's known tokens end here, so that the next one can be sampled."""


@dataclass(slots=True)
class _Entry:
    known: int
    """Tokens there are: prompt and answer so far."""
    cells: int
    """KV cells promised."""
    computed: int = 0
    """Leading tokens whose KV exists."""
    interrupted: bool = False
    """Whether it is an answer that goes on: it has begun elsewhere."""
    held: bool = False
    seq: int | None = None


@dataclass(slots=True)
class Batcher(Generic[K]):
    """The queue and the running set of one engine."""

    limits: BatchLimits
    _waiting: dict[K, _Entry] = field(default_factory=dict)
    _running: dict[K, _Entry] = field(default_factory=dict)
    _free_seqs: list[int] = field(default_factory=list)
    _promised: int = 0
    _held: int = 0

    def __post_init__(self) -> None:
        self._free_seqs = list(range(self.limits.max_sequences))[::-1]

    def __contains__(self, key: K) -> bool:
        return key in self._running or key in self._waiting

    @property
    def running(self) -> int:
        """Sequences with a sequence id."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences without one."""
        return len(self._waiting)

    @property
    def promised_cells(self) -> int:
        """KV cells of all sequences, waiting ones included, at full length."""
        return self._promised

    @property
    def cells_next_step(self) -> int:
        """Most KV cells the running sequences hold once the next step is computed.

        The drafts that may be found right in it count, none of them beyond what is promised.
        """
        most = self.limits.draft_tokens
        drafted = sum(max(0, min(most, e.cells - e.known)) for e in self._running.values())
        return drafted + sum(e.known for e in self._running.values())

    @property
    def tokens_to_fill(self) -> int:
        """Known tokens still without KV, of all sequences that do not decode yet."""
        return sum(left for e in self._entries() if (left := e.known - e.computed) > 1)

    def add(
        self, key: K, *, known: int, cells: int, computed: int = 0, interrupted: bool = False
    ) -> None:
        """Queue a sequence of `known` tokens that may grow to `cells`.

        The KV of the first `computed` tokens is there, or will be imported on admission. An
        `interrupted` answer goes before those that wait for their first token.

        Raises:
            ValueError: if the key is there already, or the engine can never hold it.
        """
        if key in self:
            raise ValueError(f"{key} is already queued or running")
        if not 0 <= computed < known <= cells <= self.limits.kv_tokens:
            raise ValueError(
                f"{key}: expected 0 <= {computed} computed < {known} known "
                f"<= {cells} cells <= {self.limits.kv_tokens}"
            )
        self._waiting[key] = _Entry(known, cells, computed, interrupted)
        self._promised += cells

    def admit(self) -> list[tuple[K, int]]:
        """Move what fits from waiting to running; gives (key, sequence id), oldest first."""
        admitted: list[tuple[K, int]] = []
        for key, entry in _interrupted_first(self._waiting):
            if not self._free_seqs or self._held + entry.cells > self.limits.kv_tokens:
                break
            entry.seq = self._free_seqs.pop()
            self._held += entry.cells
            self._running[key] = self._waiting.pop(key)
            admitted.append((key, entry.seq))
        return admitted

    def plan(self) -> list[Chunk[K]]:
        """The next step: decoding sequences first, then fills. Empty if nobody runs."""
        running = {key: entry for key, entry in self._running.items() if not entry.held}
        decoding = [(k, e) for k, e in running.items() if e.known - e.computed == 1]
        chunks = [Chunk(k, e.computed, e.known, last=True) for k, e in decoding]
        limits = self.limits
        room = min(limits.step_tokens - len(chunks), limits.prefill_tokens)
        for key, entry in _interrupted_first(running):
            if room <= 0:
                break
            if entry.known - entry.computed > 1:
                end = self._chunk_end(entry, room)
                chunks.append(Chunk(key, entry.computed, end, last=end == entry.known))
                room -= end - entry.computed
        return chunks

    def _chunk_end(self, entry: _Entry, room: int) -> int:
        if entry.known - entry.computed <= room:
            return entry.known
        end = entry.computed + room
        edge = end - end % self.limits.block_tokens
        return edge if 2 * (edge - entry.computed) >= room else end

    def advance(self, key: K, computed: int, *, sampled: int = 0) -> None:
        """The first `computed` tokens now have KV, and `sampled` new ones follow the known."""
        entry = self._running[key]
        entry.computed = computed
        entry.known += sampled

    def hold(self, key: K) -> None:
        """Plan nothing for a running sequence until `go_on`."""
        self._running[key].held = True

    def go_on(self, key: K, computed: int) -> None:
        """Plan for it again; the first `computed` tokens now have KV."""
        entry = self._running[key]
        entry.held, entry.computed = False, computed

    def remove(self, key: K) -> int | None:
        """Forget a sequence; gives the sequence id it held, if any. Its room is free."""
        if (entry := self._waiting.pop(key, None)) is None:
            entry = self._running.pop(key)
            self._held -= entry.cells
        if entry.seq is not None:
            self._free_seqs.append(entry.seq)
        self._promised -= entry.cells
        return entry.seq

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        held = sum(e.cells for e in self._running.values())
        promised = held + sum(e.cells for e in self._waiting.values())
        _require(self._held == held <= self.limits.kv_tokens, "cells held within the engine's")
        _require(self._promised == promised, "cells promised = those of all sequences")
        seqs = [e.seq for e in self._running.values()] + self._free_seqs
        _require(sorted(s for s in seqs if s is not None) == list(range(len(seqs))), "each id once")
        _require(len(seqs) == self.limits.max_sequences, "no id lost")
        _require(all(e.seq is None for e in self._waiting.values()), "who waits holds no id")
        for entry in self._entries():
            _require(0 <= entry.computed <= entry.known, "computed within known")
            _require(entry.known <= entry.cells + 1, "known within promised, last token apart")

    def _entries(self) -> Iterator[_Entry]:
        yield from self._waiting.values()
        yield from self._running.values()


def _interrupted_first(entries: dict[K, _Entry]) -> list[tuple[K, _Entry]]:
    return sorted(entries.items(), key=lambda item: not item[1].interrupted)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"batching: broken invariant: {what}")

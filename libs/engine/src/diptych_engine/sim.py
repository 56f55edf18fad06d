"""A model that costs nothing: the next token is a hash of all tokens before it.

Everything around it is real: cells are given out, shared and freed one by one, and the "KV" of a
position is the token there, so wrong, missing or misplaced KV changes the answer as it would with a
model. Misuse raises. It takes no time of its own: what a measurement shows is orchestration.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.errors import Unverified
from diptych_engine.port import EngineSpec, KvBlock, StepInput

ENGINE = "sim-1"
_HEADER = struct.Struct("<4sii")
_MAGIC = b"sim1"
_STRIDE = 64
EMBEDDING_SIZE = 64
"""Of the vectors it simulates."""
_LIKELY, _UNLIKELY = 10.0, 0.0


class History:
    """A sequence's tokens, and a hash that follows them at constant cost per token."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self._hashed = 0
        self._digest = b""

    def number(self) -> int:
        """64 bits that depend on every token and its place."""
        while len(self.tokens) - self._hashed > _STRIDE:
            self._digest = self._next(self.tokens[self._hashed : self._hashed + _STRIDE])
            self._hashed += _STRIDE
        return int.from_bytes(self._next(self.tokens[self._hashed :]), "little")

    def _next(self, tokens: Sequence[int]) -> bytes:
        block = struct.pack(f"<{len(tokens)}i", *tokens)
        return hashlib.blake2b(self._digest + block, digest_size=8).digest()


def likeliest_after(history: History, spoken: Sequence[int]) -> int:
    """The token, of those the model speaks, that it finds likeliest."""
    return spoken[history.number() % len(spoken)]


@dataclass(slots=True)
class _Sequence:
    history: History = field(default_factory=History)
    cells: list[int] = field(default_factory=list)


class Cells:
    """KV cells, each held by any number of sequences."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self._holders = [0] * count

    @property
    def used(self) -> int:
        """Cells somebody holds."""
        return len(self._holders) - len(self._free)

    def take(self, count: int) -> list[int]:
        """Fresh cells. Raises `ValueError` if there are too few."""
        if count > len(self._free):
            raise ValueError(f"no room for {count} tokens, {len(self._free)} cells are free")
        taken = [self._free.pop() for _ in range(count)]
        for cell in taken:
            self._holders[cell] = 1
        return taken

    def share(self, cells: Sequence[int]) -> None:
        """One more holder each."""
        for cell in cells:
            self._holders[cell] += 1

    def give_back(self, cells: Sequence[int]) -> None:
        """One holder less each; cells that nobody holds are free."""
        for cell in cells:
            self._holders[cell] -= 1
            if self._holders[cell] == 0:
                self._free.append(cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """The simulated model, and how much it holds."""

    spoken: Sequence[int]
    """Tokens it may find likeliest."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    fingerprint: Fingerprint
    context_tokens: int = 4096
    kv_tokens: int = 16_384
    max_sequences: int = 16
    prefix_sequences: int = 0
    prefix_tokens: int = 16_384
    block_tokens: int = 64
    step_tokens: int = 256
    draft_tokens: int = 0
    """Tokens drafted after each sampled one, as by speculation or multi-token prediction."""
    acceptance: float = 0.7
    """How probably a draft is right, if those before it are; in [0, 1]."""


class SimEmbedder:
    """Simulated vectors: a hash of each token, averaged. Texts that share tokens are closer."""

    def __init__(self, *, max_tokens: int, size: int = EMBEDDING_SIZE) -> None:
        self.size, self.max_tokens, self.chunk_tokens = size, max_tokens, _STRIDE
        self._sum = np.zeros(size)

    def begin(self) -> None:
        """Forget the text before."""
        self._sum = np.zeros(self.size)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Add tokens."""
        for token in token_ids:
            self._sum += np.random.Generator(np.random.Philox(token)).standard_normal(self.size)

    def vector(self) -> NDArray[np.float32]:
        """The vector of all that was fed."""
        return (self._sum / (np.linalg.norm(self._sum) or 1.0)).astype(np.float32)


class SimStepEngine:
    """A deterministic `StepEngine` without weights."""

    def __init__(self, settings: SimSettings) -> None:
        self._spoken = settings.spoken
        self.draft_tokens = settings.draft_tokens
        self._acceptance = settings.acceptance
        self._cells = Cells(settings.kv_tokens)
        self._sequences: dict[int, _Sequence] = {}
        self._rows: list[NDArray[np.float32]] = []
        self._closed = False
        self.embedder = SimEmbedder(max_tokens=settings.context_tokens)
        self.spec = EngineSpec(
            engine=ENGINE,
            fingerprint=settings.fingerprint,
            layout=KvLayout(
                layout_id="sim-ids-v1",
                engine_build=ENGINE,
                block_tokens=settings.block_tokens,
                slot_bytes=_HEADER.size + 4 * settings.block_tokens,
                dtype="i32",
            ),
            context_tokens=settings.context_tokens,
            kv_tokens=settings.kv_tokens,
            max_sequences=settings.max_sequences,
            vocab_size=settings.vocab_size,
            eos_ids=settings.eos_ids,
            step_tokens=settings.step_tokens,
            prefix_sequences=settings.prefix_sequences,
            prefix_tokens=settings.prefix_tokens,
            embedding_size=self.embedder.size,
            embedding_tokens=self.embedder.max_tokens,
        )

    @property
    def cells_used(self) -> int:
        """KV cells in use, shared ones counted once."""
        return self._cells.used

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        """Compute one batch; see `port.StepEngine`."""
        if self._closed:
            raise RuntimeError("step after close")
        if len({run.seq for run in inputs}) != len(inputs):
            raise ValueError("a sequence may stand in a step once")
        while len(self._rows) < len(inputs):
            self._rows.append(np.empty(self.spec.vocab_size, np.float32))
        return [self._run(run, row) for run, row in zip(inputs, self._rows, strict=False)]

    def _run(self, run: StepInput, row: NDArray[np.float32]) -> NDArray[np.float32] | None:
        sequence = self._sequence(run.seq)
        tokens = sequence.history.tokens
        if run.position != len(tokens) or not run.token_ids:
            raise ValueError(
                f"sequence {run.seq}: expected position {len(tokens)} and tokens, "
                f"got {run.position} and {len(run.token_ids)}"
            )
        if not 0 <= min(run.token_ids) <= max(run.token_ids) < self.spec.vocab_size:
            raise ValueError(f"sequence {run.seq}: a token beyond the vocabulary")
        if len(tokens) + len(run.token_ids) > self.spec.context_tokens:
            raise ValueError(f"sequence {run.seq}: beyond the context")
        sequence.cells += self._cells.take(len(run.token_ids))
        tokens.extend(run.token_ids)
        if not run.want_logits:
            return None
        self.fill_logits(row, sequence.history)
        return row

    def accepted_drafts(self, seq: int) -> int:
        """How many drafts are right: a function of the sequence; see `port.StepEngine`."""
        bits = self._sequence(seq).history.number() >> 16
        for count in range(self.draft_tokens):
            if (bits >> 10 * count & 1023) / 1024 >= self._acceptance:
                return count
        return self.draft_tokens

    def fill_logits(self, row: NDArray[np.float32], history: History) -> None:
        """Write what the model finds of each token into `row` `[vocab]`."""
        row.fill(_UNLIKELY)
        row[likeliest_after(history, self._spoken)] = _LIKELY

    def export_block(self, seq: int, p0: int, p1: int, out: memoryview) -> int:
        """Write the tokens of positions [p0, p1) into `out`; gives the number of bytes."""
        ids = self._held(seq, p0, p1)
        data = _HEADER.pack(_MAGIC, p0, p1) + np.asarray(ids, "<i4").tobytes()
        out.cast("B")[: len(data)] = data
        return len(data)

    def import_block(self, seq: int, block: KvBlock) -> None:
        """Add `block` to `seq`; see `port.StepEngine`."""
        data = bytes(block.data)
        expected = _HEADER.pack(_MAGIC, block.p0, block.p1)
        if len(data) != len(expected) + 4 * (block.p1 - block.p0) or not data.startswith(expected):
            raise Unverified(f"KV of [{block.p0}, {block.p1}) is not what it should be")
        sequence = self._ending_at(seq, block.p0)
        sequence.cells += self._cells.take(block.p1 - block.p0)
        sequence.history.tokens.extend(np.frombuffer(data, "<i4", offset=len(expected)).tolist())

    def fork(self, src_seq: int, dst_seq: int, p0: int, p1: int) -> bool:
        """Let `dst_seq` share cells with `src_seq`; see `port.StepEngine`."""
        ids = self._held(src_seq, p0, p1)
        cells = self._sequence(src_seq).cells[p0:p1]
        sequence = self._ending_at(dst_seq, p0)
        self._cells.share(cells)
        sequence.cells += cells
        sequence.history.tokens.extend(ids)
        return True

    def drop(self, seq: int) -> None:
        """Free all cells of `seq` that no other sequence shares."""
        self._cells.give_back(self._sequence(seq).cells)
        del self._sequences[seq]

    def close(self) -> None:
        """Refuse to compute from now on."""
        self._closed = True

    def _sequence(self, seq: int) -> _Sequence:
        limit = self.spec.max_sequences + self.spec.prefix_sequences
        if not 0 <= seq < limit:
            raise ValueError(f"sequence id {seq} is not in [0, {limit})")
        return self._sequences.setdefault(seq, _Sequence())

    def _held(self, seq: int, p0: int, p1: int) -> list[int]:
        ids = self._sequence(seq).history.tokens[p0:p1]
        if not 0 <= p0 < p1 or len(ids) != p1 - p0:
            raise ValueError(f"sequence {seq} does not hold positions [{p0}, {p1})")
        return ids

    def _ending_at(self, seq: int, end: int) -> _Sequence:
        sequence = self._sequence(seq)
        if len(sequence.cells) != end:
            raise ValueError(f"sequence {seq} ends at {len(sequence.cells)}, expected {end}")
        return sequence

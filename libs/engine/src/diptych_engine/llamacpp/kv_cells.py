"""The KV cache: every change to it, so that each sequence lies in ascending cells.

Why that matters, and how it is done without a call for it: `placement`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diptych_engine.llamacpp.model import SPARE_CELLS, LoadedModel
from diptych_engine.llamacpp.placement import NoCellAbove, OutOfFillers, Placement, Span, Want
from diptych_engine.llamacpp.settings import FILLERS, LlamaCppSettings

_HEADER_BYTES = 16
"""Of a sequence's blob: mark, flags, streams, number of cells. Then 12 bytes for each cell, in the
order of the cells: its position, how many sequences it has (1), which."""
_MOVES_PER_SEQUENCE = 4


class _Saved(NamedTuple):
    """A sequence on its way from one layout to another."""

    seq: int
    length: int
    like: int | None
    """A sequence saved before that shares its first `shared` cells."""
    shared: int
    data: bytearray | None
    """The KV behind those."""


class KvCells:
    """The cache of one context."""

    def __init__(self, model: LoadedModel, settings: LlamaCppSettings) -> None:
        self._ffi, self._lib, self._context = model.ffi, model.lib, model.context
        self._memory = model.memory
        self._scratch = settings.sequence_ids
        first = self._scratch + 1
        self._books = Placement(settings.kv_tokens + SPARE_CELLS, range(first, first + FILLERS))

    def length(self, seq: int) -> int:
        """Tokens a sequence has."""
        return self._books.length(seq)

    def place(self, wants: Sequence[Want]) -> list[list[int]]:
        """Make just those cells free which `wants` are given; gives them.

        The tokens must be put there at once, in the order of the cells.

        Raises:
            RuntimeError: if there is no room, which correct bookkeeping rules out.
        """
        for _ in range(_MOVES_PER_SEQUENCE * len(wants)):
            try:
                planned = self._books.plan(wants)
            except NoCellAbove as stuck:
                if self.length(stuck.seq) == 0:
                    break
                self._move(stuck.seq)
            else:
                self._remove(self._books.take(wants, planned))
                return planned
        raise RuntimeError(f"no room in the KV cache for {sum(w.tokens for w in wants)} tokens")

    def share(self, span: Span, dst: int) -> bool:
        """Let `dst` share a span, if it lies behind its own cells."""
        joined = self._books.join(span.seq, dst, span.p0, span.p1)
        if joined:
            self._copy(span, dst)
        return joined

    def drop(self, seq: int) -> None:
        """Forget a sequence."""
        try:
            leaving = self._books.leave(seq)
        except OutOfFillers:
            self._pack()
            leaving = self._books.leave(seq)
        for span in leaving.spans:
            if leaving.filler is not None:
                self._copy(span, leaving.filler)
        self._lib.llama_memory_seq_rm(self._memory, seq, -1, -1)
        self._remove(self._books.trim())

    def read_size(self, span: Span) -> int:
        """Size of a span's blob."""
        self._copy(span, self._scratch)
        size: int = self._lib.llama_state_seq_get_size_ext(self._context, self._scratch, 0)
        self._lib.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)
        return size

    def read(self, span: Span, out: memoryview) -> int:
        """Write a span's blob to `out`; gives the number of bytes, 0 if they do not fit."""
        self._copy(span, self._scratch)
        target = self._ffi.from_buffer("uint8_t[]", out, require_writable=True)
        n_bytes: int = self._lib.llama_state_seq_get_data_ext(
            self._context, target, len(target), self._scratch, 0
        )
        self._lib.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)
        return n_bytes

    def write(self, span: Span, blob: memoryview) -> bool:
        """Continue a sequence by a blob; False, and nothing has changed, if the blob is refused."""
        count = span.p1 - span.p0
        if not ascending(blob, span):
            return False
        self.place([Want(span.seq, count)])
        data = self._ffi.from_buffer("uint8_t[]", blob)
        # Replaces all of the sequence it goes to: hence by way of scratch.
        taken = self._lib.llama_state_seq_set_data_ext(
            self._context, data, blob.nbytes, self._scratch, 0
        )
        if taken == blob.nbytes:
            self._copy(Span(self._scratch, span.p0, span.p1), span.seq)
        self._lib.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)
        if taken != blob.nbytes:
            self._books.shorten(span.seq, span.p0)
            self._pack()  # the cells made free for it are holes now
        return bool(taken == blob.nbytes)

    def _move(self, seq: int) -> None:
        """Put a sequence into the lowest free cells; what others share of it stays theirs."""
        length = self.length(seq)
        data = self._saved(Span(seq, 0, length))
        self.drop(seq)
        self._restore(Span(seq, 0, length), data)

    def _pack(self) -> None:
        """Put everything down anew, without fillers in between. Rare: tens of milliseconds."""
        saved = [self._save(seq, shared) for seq, shared in self._books.shared_beginnings()]
        self._lib.llama_memory_clear(self._memory, False)
        self._books.reset()
        for one in saved:
            if one.like is not None:
                self.share(Span(one.like, 0, one.shared), one.seq)
            if one.data is not None:
                self._restore(Span(one.seq, one.shared, one.length), one.data)

    def _save(self, seq: int, shared: tuple[int | None, int]) -> _Saved:
        like, count = shared
        length = self.length(seq)
        data = self._saved(Span(seq, count, length)) if count < length else None
        return _Saved(seq, length, like, count, data)

    def _saved(self, span: Span) -> bytearray:
        data = bytearray(self.read_size(span))
        if self.read(span, memoryview(data)) != len(data):
            raise RuntimeError(f"KV of {span} cannot be read")
        return data

    def _restore(self, span: Span, data: bytearray) -> None:
        if not self.write(span, memoryview(data)):
            raise RuntimeError(f"KV of {span} cannot be put back")

    def _copy(self, span: Span, dst: int) -> None:
        self._lib.llama_memory_seq_cp(self._memory, span.seq, dst, span.p0, span.p1)

    def _remove(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._lib.llama_memory_seq_rm(self._memory, span.seq, span.p0, span.p1)


def ascending(blob: memoryview, span: Span) -> bool:
    """Whether a blob says that it holds just the positions of `span`, in order."""
    count = span.p1 - span.p0
    if blob.nbytes < _HEADER_BYTES + 12 * count:
        return False
    header = np.frombuffer(blob, np.int32, count=_HEADER_BYTES // 4 + 3 * count)
    cells = header[_HEADER_BYTES // 4 :].reshape(count, 3)
    positions = np.arange(span.p0, span.p1)
    known = header[3] == count and (cells[:, 1] == 1).all()
    return bool(known and (cells[:, 0] == positions).all())

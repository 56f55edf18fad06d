"""Where the K and V rows of a block lie, so that a codec can treat them as numbers.

A layout that is not understood, or a block that is not what its layout says, gives None: it is
carried as it is. What lies between the rows (a blob's headers) is kept byte by byte.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import KvLayout

LLAMA_SEQ = "llama-seq-v1"
PAGED = "paged-v1"
"""`[layer][k|v][token][kv_head][head_dim]`, nothing else: of engines whose KV lies so."""
F16 = "f16"
MAX_TENSORS = 4096
_ITEM_BYTES = 2
_CELL_INTS = 3
_HEADER_INTS = 4
_SHAPE_INTS = 4
_GGML_F16 = 1


@dataclass(frozen=True, slots=True)
class Tensors:
    """K of all layers, then V of all layers: each `[rows, dim]` of f16 at its offset."""

    rows: int
    dim: int
    offsets: NDArray[np.uint32]

    @property
    def n_bytes(self) -> int:
        """Of each."""
        return self.rows * self.dim * _ITEM_BYTES

    @property
    def total_bytes(self) -> int:
        """Of all."""
        return len(self.offsets) * self.n_bytes

    def fit(self, block_bytes: int) -> bool:
        """Whether they lie in a block of that size, one behind the other or in any order."""
        starts = np.sort(self.offsets.astype(np.int64))
        ends = starts + self.n_bytes
        return (
            0 < len(starts) <= MAX_TENSORS
            and len(starts) % 2 == 0
            and self.rows > 0
            and self.dim > 0
            and self.total_bytes <= block_bytes
            and int(ends[-1]) <= block_bytes
            and bool((ends[:-1] <= starts[1:]).all())
        )

    def gather(self, block: memoryview) -> NDArray[np.float16]:
        """The numbers `[tensor, row, dim]`."""
        found = np.empty((len(self.offsets), self.rows, self.dim), "<f2")
        count = self.rows * self.dim
        for tensor, offset in zip(found, self.offsets.tolist(), strict=True):
            tensor.reshape(-1)[:] = np.frombuffer(block, "<f2", count, offset)
        return found

    def scatter(self, numbers: NDArray[np.float16], block: bytearray) -> None:
        """Put the numbers where they belong."""
        target = memoryview(block)
        for tensor, offset in zip(numbers, self.offsets.tolist(), strict=True):
            target[offset : offset + self.n_bytes] = tensor.reshape(-1).view(np.uint8)

    def between(self, block_bytes: int) -> list[tuple[int, int]]:
        """The spans [start, end) of a block that belong to no tensor."""
        spans, at = [], 0
        for offset in np.sort(self.offsets).tolist():
            if at < offset:
                spans.append((at, offset))
            at = offset + self.n_bytes
        return [*spans, (at, block_bytes)] if at < block_bytes else spans


def find_tensors(layout: KvLayout, block: memoryview) -> Tensors | None:
    """Where K and V lie in a block of `layout`; None: not understood."""
    if layout.dtype != F16:
        return None
    match layout.layout_id:
        case "llama-seq-v1":
            found = _in_llama_blob(block)
        case "paged-v1":
            found = _in_paged(layout, block)
        case _:
            found = None
    return found if found is not None and found.fit(block.nbytes) else None


def _in_paged(layout: KvLayout, block: memoryview) -> Tensors | None:
    heads, ranks = layout.kv_heads, max(layout.tp, 1)
    dim = heads // ranks * layout.head_dim
    if not (dim and layout.layers) or heads % ranks:
        return None
    rows, rest = divmod(block.nbytes, 2 * layout.layers * dim * _ITEM_BYTES)
    if rest or not rows:
        return None
    order = np.arange(2 * layout.layers).reshape(layout.layers, 2).T.reshape(-1)
    return Tensors(rows, dim, (order * (rows * dim * _ITEM_BYTES)).astype(np.uint32))


def _in_llama_blob(block: memoryview) -> Tensors | None:
    """As llama.cpp b11549 writes a sequence whose V is not transposed.

    16 bytes: mark, flags, streams (1), cells. 12 for each cell: position, sequences (1), which.
    16: V transposed (0), layers, and two numbers that are 0 where K is not rotated. Then K of each
    layer, then V of each: type (1: f16), bytes of a row (64 bits), rows. Nothing follows.
    """
    at = 4 * _HEADER_INTS
    if block.nbytes < at + 4 * _SHAPE_INTS:
        return None
    _, _, streams, rows = struct.unpack_from("<4i", block)
    at += 4 * _CELL_INTS * rows
    if streams != 1 or rows < 1 or at + 4 * _SHAPE_INTS > block.nbytes:
        return None
    transposed, layers, *rotated = struct.unpack_from("<4i", block, at)
    at += 4 * _SHAPE_INTS
    if transposed or any(rotated) or not 0 < layers <= MAX_TENSORS // 2:
        return None
    offsets, widths = [], set()
    for _ in range(2 * layers):
        if at + 12 > block.nbytes:
            return None
        kind, row_bytes = struct.unpack_from("<iQ", block, at)
        if kind != _GGML_F16 or row_bytes % _ITEM_BYTES:
            return None
        offsets.append(at + 12)
        widths.add(row_bytes)
        at += 12 + rows * row_bytes
    if at != block.nbytes or len(widths) != 1:
        return None
    return Tensors(rows, widths.pop() // _ITEM_BYTES, np.array(offsets, np.uint32))

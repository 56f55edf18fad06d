"""KV of one layout as KV of another: other block sizes, other splits over ranks. Byte for byte.

For `paged-v1` only, `[layer][k|v][token][kv_head][head_dim]`: there a head of a token is a run of
bytes, whatever its numbers mean. Blocks are those of each rank, in order; the last one of a rank
may be shorter. Pure; no link does this by itself yet: nothing served here has KV of this layout.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import Incompatible
from diptych_kvlink.codecs.tensors import PAGED

_ITEM_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f8": 1}
_BRIDGED = {"block_tokens", "slot_bytes", "tp", "engine_build"}
"""What may differ between two layouts of `paged-v1`: the build says nothing of its bytes."""

Blocks = Sequence[Sequence[bytes | memoryview]]
"""Of each rank."""


def unbridged(ours: KvLayout, theirs: KvLayout) -> list[str]:
    """The fields that differ and cannot be converted; empty: KV of the one can become the other's.

    Equal layouts need no conversion, whatever they are.
    """
    differing = [
        name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)
    ]
    if all(_is_plain(layout) for layout in (ours, theirs)):
        return [name for name in differing if name not in _BRIDGED]
    return differing


def convert(blocks: Blocks, src: KvLayout, dst: KvLayout) -> list[list[bytes]]:
    """`blocks` of `src`, as those of `dst`.

    Raises:
        Incompatible: the two cannot be bridged (names the fields), or `blocks` are none of `src`.
    """
    if (fields := unbridged(src, dst)) or not _is_plain(src):
        raise Incompatible(
            f"KV of {src.layout_id} cannot become {dst.layout_id}: "
            f"{', '.join(fields) or 'its shape is its own secret'}"
        )
    return _split(_joined(blocks, src), dst)


def block_bytes(layout: KvLayout, tokens: int) -> int:
    """What `tokens` tokens of one rank take."""
    return 2 * layout.layers * tokens * layout.kv_heads // layout.tp * _head_bytes(layout)


def _is_plain(layout: KvLayout) -> bool:
    """Whether its shape is known, and its heads can be split so."""
    return (
        layout.layout_id == PAGED
        and layout.dtype in _ITEM_BYTES
        and min(layout.layers, layout.kv_heads, layout.head_dim, layout.tp) > 0
        and layout.block_tokens > 0
        and layout.kv_heads % layout.tp == 0
        and layout.slot_bytes == block_bytes(layout, layout.block_tokens)
    )


def _head_bytes(layout: KvLayout) -> int:
    return layout.head_dim * _ITEM_BYTES[layout.dtype]


def _joined(blocks: Blocks, layout: KvLayout) -> NDArray[np.uint8]:
    """All of them: `[layer, k|v, token, head, byte]`."""
    ranks = [_rank(one, layout) for one in blocks]
    if len(ranks) != layout.tp or len({rank.shape[2] for rank in ranks}) != 1:
        raise Incompatible(
            f"expected blocks of {layout.tp} ranks, all of as many tokens, "
            f"got {[rank.shape[2] for rank in ranks]}"
        )
    return np.concatenate(ranks, axis=3)


def _rank(blocks: Sequence[bytes | memoryview], layout: KvLayout) -> NDArray[np.uint8]:
    heads, head = layout.kv_heads // layout.tp, _head_bytes(layout)
    token_bytes = block_bytes(layout, 1)
    found = []
    for index, block in enumerate(blocks):
        data = np.frombuffer(block, np.uint8)
        tokens, rest = divmod(len(data), token_bytes)
        last, short = index == len(blocks) - 1, tokens < layout.block_tokens
        if rest or not 0 < tokens <= layout.block_tokens or (short and not last):
            raise Incompatible(
                f"block {index} of {len(blocks)} has {len(data)} bytes, "
                f"expected {layout.slot_bytes}{' at most' if last else ''}, by {token_bytes}"
            )
        found.append(data.reshape(layout.layers, 2, tokens, heads, head))
    if not found:
        raise Incompatible("expected a block of each rank at least")
    return np.concatenate(found, axis=2)


def _split(numbers: NDArray[np.uint8], layout: KvLayout) -> list[list[bytes]]:
    size = layout.block_tokens
    return [
        [rank[:, :, at : at + size].tobytes() for at in range(0, rank.shape[2], size)]
        for rank in np.split(numbers, layout.tp, axis=3)
    ]

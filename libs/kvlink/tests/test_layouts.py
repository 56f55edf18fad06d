import msgspec
import numpy as np
import pytest

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import Incompatible
from diptych_kvlink.layouts import block_bytes, convert, unbridged


def layout(tp=1, block_tokens=16, **changes):
    made = KvLayout(
        layout_id="paged-v1",
        engine_build="paged-1",
        block_tokens=block_tokens,
        slot_bytes=0,
        dtype="f16",
        layers=3,
        kv_heads=8,
        head_dim=4,
        tp=tp,
    )
    made = msgspec.structs.replace(made, **changes)
    return msgspec.structs.replace(made, slot_bytes=block_bytes(made, block_tokens))


def whole(tokens, shape):
    """Numbers that all differ: `[layer, k|v, token, head, dim]`."""
    count = shape.layers * 2 * tokens * shape.kv_heads * shape.head_dim
    numbers = np.arange(count, dtype=np.uint16)
    return numbers.reshape(shape.layers, 2, tokens, shape.kv_heads, shape.head_dim)


def blocks(numbers, shape):
    """As an engine of that layout holds them, cut by hand."""
    heads, size = shape.kv_heads // shape.tp, shape.block_tokens
    return [
        [
            numbers[:, :, at : at + size, rank * heads : (rank + 1) * heads].tobytes()
            for at in range(0, numbers.shape[2], size)
        ]
        for rank in range(shape.tp)
    ]


@pytest.mark.parametrize("tokens", [1, 15, 16, 64, 130, 192])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (layout(tp=2), layout(tp=4)),
        (layout(tp=4), layout(tp=2)),
        (layout(block_tokens=16), layout(block_tokens=64)),
        (layout(block_tokens=64), layout(block_tokens=16)),
        (layout(tp=2, block_tokens=16), layout(tp=4, block_tokens=64)),
        (layout(tp=8, block_tokens=64), layout(tp=1, block_tokens=24)),
    ],
)
def test_other_splits_and_block_sizes_are_converted_byte_for_byte(src, dst, tokens):
    numbers = whole(tokens, src)
    made = convert(blocks(numbers, src), src, dst)
    assert made == blocks(numbers, dst)
    assert convert(made, dst, src) == blocks(numbers, src)


def test_what_cannot_be_bridged_is_named():
    assert unbridged(layout(), layout()) == []
    assert unbridged(layout(tp=2), layout(tp=4, block_tokens=64)) == []
    assert unbridged(layout(), layout(head_dim=8, dtype="f32")) == ["dtype", "head_dim"]
    assert unbridged(layout(), layout(version=2)) == ["version"]
    with pytest.raises(Incompatible, match="head_dim"):
        convert(blocks(whole(16, layout()), layout()), layout(), layout(head_dim=8))


def test_a_layout_whose_shape_is_a_secret_is_never_converted():
    secret = layout(layout_id="llama-seq-v1", layers=0)
    assert unbridged(secret, secret) == []
    assert "block_tokens" in unbridged(secret, msgspec.structs.replace(secret, block_tokens=64))
    with pytest.raises(Incompatible, match="secret"):
        convert([[b""]], secret, secret)


def test_heads_that_do_not_split_evenly_are_not_converted():
    assert unbridged(layout(tp=2), layout(tp=3))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ranks: ranks[:1],
        lambda ranks: [ranks[0], ranks[1][:-1]],
        lambda ranks: [ranks[0], [*ranks[1][:-1], ranks[1][-1][:-1]]],
        lambda ranks: [ranks[0], [*ranks[1], ranks[1][0] * 2]],
        lambda ranks: [[one[: len(one) // 2] for one in rank] for rank in ranks],
        lambda ranks: [[], []],
        lambda ranks: [[b""], [b""]],
    ],
)
def test_blocks_that_are_none_of_the_layout_are_refused(spoil):
    src, dst = layout(tp=2), layout(tp=4)
    with pytest.raises(Incompatible):
        convert(spoil(blocks(whole(32, src), src)), src, dst)

import random
import struct

import numpy as np
import pytest

from diptych_contracts.cards import KvLayout
from diptych_contracts.codecs import CODECS, DELTA, FP8, INT8, LOSSLESS, LOSSY, RAW
from diptych_contracts.errors import Unverified
from diptych_kvlink.codecs import decode_block, encode_block
from diptych_kvlink.codecs.entropy import squeeze, unsqueeze
from diptych_kvlink.codecs.frame import HEAD_BYTES, Frame
from diptych_kvlink.codecs.tensors import find_tensors

LAYERS, HEADS, HEAD_DIM = 6, 2, 64
DIM = HEADS * HEAD_DIM


def layout(layout_id="llama-seq-v1", dtype="f16", tp=1):
    return KvLayout(
        layout_id=layout_id,
        engine_build="b",
        block_tokens=64,
        slot_bytes=1 << 20,
        dtype=dtype,
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        tp=tp,
    )


LLAMA, PAGED = layout(), layout("paged-v1")


def numbers(rows, seed=1):
    """`[2 * layers, rows, dim]`: channels of K have a mean and a size of their own."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((2 * LAYERS, rows, DIM))
    made[:LAYERS] *= rng.lognormal(0, 1, (LAYERS, 1, DIM))
    made[:LAYERS] += 8 * rng.standard_normal((LAYERS, 1, DIM))
    return made.astype("<f2")


def llama_block(rows, seed=1, made=None):
    made = numbers(rows, seed) if made is None else made
    cells = b"".join(struct.pack("<3i", position, 1, 34) for position in range(rows))
    head = struct.pack("<4i", -1357628200, 34, 1, rows) + cells
    head += struct.pack("<4i", 0, LAYERS, 0, 0)
    parts = [struct.pack("<iQ", 1, 2 * DIM) + tensor.tobytes() for tensor in made]
    return memoryview(head + b"".join(parts))


def paged_block(rows, seed=1):
    made = numbers(rows, seed).reshape(2, LAYERS, rows, DIM)
    return memoryview(made.swapaxes(0, 1).tobytes())


BLOCKS = [
    *((LLAMA, llama_block(rows)) for rows in (1, 2, 63, 64)),
    *((PAGED, paged_block(rows)) for rows in (1, 17, 64)),
]


def carried(codec, kind, block):
    coded = encode_block(codec, kind, block)
    assert coded is not None
    return coded, memoryview(decode_block(codec, memoryview(coded), block.nbytes))


@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_the_lossless_codec_gives_every_byte_back(kind, block):
    coded, decoded = carried(LOSSLESS, kind, block)
    assert bytes(decoded) == bytes(block)
    assert len(coded) < len(block)


@pytest.mark.parametrize("size", [1, 2, 3, 1001])
def test_the_lossless_codec_takes_any_bytes(size):
    block = memoryview(bytes(size))
    coded = encode_block(LOSSLESS, layout("unknown"), block)
    if coded is not None:
        assert bytes(decode_block(LOSSLESS, memoryview(coded), size)) == bytes(block)
    else:
        assert size < 200
    assert encode_block(LOSSLESS, LLAMA, memoryview(random.Random(1).randbytes(999))) is None


@pytest.mark.parametrize(
    ("codec", "least", "most_error"), [(INT8, 2.0, 0.02), (FP8, 2.0, 0.1), (DELTA, 3.0, 0.11)]
)
@pytest.mark.parametrize(("kind", "block"), [BLOCKS[3], BLOCKS[6]])
def test_lossy_codecs_are_so_small_and_so_near(codec, least, most_error, kind, block):
    coded, decoded = carried(codec, kind, block)
    assert len(block) / len(coded) >= least
    tensors = find_tensors(kind, block)
    before, after = (tensors.gather(one).astype(np.float64) for one in (block, decoded))
    if codec == FP8:  # Of the number itself, which may stand far from zero.
        assert np.abs(after - before).max() <= 0.13 * np.abs(before).max()
        return
    spread = before.std(axis=1, keepdims=True).mean(axis=2, keepdims=True)
    for half in (slice(0, LAYERS), slice(LAYERS, None)):
        error = np.sqrt(((after - before)[half] ** 2).mean()) / spread[half].mean()
        assert error < 3 * most_error


@pytest.mark.parametrize("codec", sorted(LOSSY))
@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_what_lies_between_the_tensors_is_kept_byte_by_byte(codec, kind, block):
    coded = encode_block(codec, kind, block)
    if coded is None:  # Not smaller: a block of one token.
        assert len(block) < 10_000
        return
    decoded = memoryview(decode_block(codec, memoryview(coded), block.nbytes))
    tensors = find_tensors(kind, block)
    for start, end in tensors.between(block.nbytes):
        assert decoded[start:end] == block[start:end]


def test_a_channel_with_an_outlier_is_coarser_but_never_clipped():
    made = numbers(64)
    made[2, 5, 7], made[LAYERS + 1, 9, 3] = 60_000, -60_000
    block = llama_block(64, made=made)
    for codec in (INT8, DELTA):
        _, decoded = carried(codec, LLAMA, block)
        after = find_tensors(LLAMA, block).gather(decoded)
        assert after[2, 5, 7] == pytest.approx(60_000, rel=0.01)
        assert after[LAYERS + 1, 9, 3] == pytest.approx(-60_000, rel=0.01)


@pytest.mark.parametrize("value", [0.0, 1.5, -65504.0, 6e-8])
def test_constant_kv_is_nearly_kept(value):
    made = np.full((2 * LAYERS, 64, DIM), value, "<f2")
    block = llama_block(64, made=made)
    for codec in (INT8, DELTA):
        _, decoded = carried(codec, LLAMA, block)
        after = find_tensors(LLAMA, block).gather(decoded).astype(np.float64)
        assert np.allclose(after, made.astype(np.float64), rtol=0.05, atol=1e-6)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("codec", sorted(LOSSY))
def test_kv_that_is_no_number_is_left_as_it_is(codec, value):
    made = numbers(64)
    made[3, 3, 3] = value
    assert encode_block(codec, LLAMA, llama_block(64, made=made)) is None


def _patched(at, value):
    made = bytearray(llama_block(8))
    struct.pack_into("<i", made, at, value)
    return memoryview(made)


@pytest.mark.parametrize(
    "block",
    [
        memoryview(b""),
        memoryview(b"sim"),
        llama_block(8)[:-1],
        llama_block(8)[:100],
        memoryview(bytes(llama_block(8)) + b"x"),
        _patched(8, 2),  # streams
        _patched(12, 9),  # cells
        _patched(12, -1),
        _patched(12, 2**31 - 1),
        _patched(16 + 96, 1),  # V transposed
        _patched(20 + 96, 0),  # layers
        _patched(20 + 96, 2**31 - 1),
        _patched(24 + 96, 1),  # rotated
        _patched(32 + 96, 8),  # q8_0
        _patched(36 + 96, 255),  # bytes of a row
        _patched(40 + 96, -1),
    ],
)
def test_a_blob_that_is_not_understood_is_left_as_it_is(block):
    assert find_tensors(LLAMA, block) is None
    assert all(encode_block(codec, LLAMA, block) is None for codec in LOSSY)


@pytest.mark.parametrize(
    "kind", [layout("other"), layout(dtype="q8_0"), layout("paged-v1", dtype="f32")]
)
def test_a_layout_that_is_not_known_is_left_as_it_is(kind):
    assert find_tensors(kind, llama_block(8)) is None
    assert find_tensors(kind, paged_block(8)) is None


def test_a_rank_of_a_split_model_has_its_share_of_the_heads():
    found = find_tensors(layout("paged-v1", tp=2), paged_block(8))
    assert (found.rows, found.dim) == (16, DIM // 2)
    assert find_tensors(layout("paged-v1", tp=3), paged_block(8)) is None


def test_raw_and_unknown_codecs_encode_nothing():
    assert encode_block(RAW, LLAMA, BLOCKS[3][1]) is None
    assert encode_block("gzip", LLAMA, BLOCKS[3][1]) is None


@pytest.mark.parametrize("codec", CODECS[1:])
def test_no_altered_block_harms_its_reader(codec):
    block = llama_block(16)
    coded = encode_block(codec, LLAMA, block)
    rng = random.Random(codec)
    for _ in range(300):
        spoiled = bytearray(coded)
        for _ in range(rng.choice((1, 1, 3))):
            spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        try:
            decoded = decode_block(codec, memoryview(bytes(spoiled)), block.nbytes)
        except Unverified:
            continue
        assert len(decoded) == block.nbytes


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_truncated_block_is_refused(codec):
    block = llama_block(16)
    coded = encode_block(codec, LLAMA, block)
    for length in (*range(HEAD_BYTES + 20), len(coded) // 2, len(coded) - 1):
        with pytest.raises(Unverified):
            decode_block(codec, memoryview(coded[:length]), block.nbytes)
    with pytest.raises(Unverified):
        decode_block(codec, memoryview(coded + b"x"), block.nbytes)


def test_a_block_of_another_codec_or_size_is_refused():
    block = llama_block(16)
    coded = memoryview(encode_block(INT8, LLAMA, block))
    with pytest.raises(Unverified, match=r"expected .* by codec delta"):
        decode_block(DELTA, coded, block.nbytes)
    with pytest.raises(Unverified):
        decode_block(INT8, coded, block.nbytes + 2)
    with pytest.raises(Unverified):
        decode_block(RAW, coded, block.nbytes)


def test_a_bomb_is_noticed_before_it_goes_off():
    bomb = squeeze(bytes(1 << 28))
    assert len(bomb) < 100_000
    with pytest.raises(Unverified):
        unsqueeze(memoryview(bomb), 1000)
    for codec, frame in (
        (LOSSLESS, Frame(LOSSLESS, 0, 0, 0, 1000, (b"", bomb, bomb))),
        (INT8, Frame(INT8, 2, 1, 10, 1000, (bomb, bomb, bomb))),
        (INT8, Frame(INT8, 2, 2**31, 2**31, 1000, (bomb, bomb, bomb))),
        (DELTA, Frame(DELTA, 65534, 1, 1, 1000, (bomb, bomb, bomb))),
    ):
        with pytest.raises(Unverified):
            decode_block(codec, memoryview(frame.pack()), 1000)


@pytest.mark.parametrize("offsets", [(0, 0), (0, 10), (984, 0), (2**32 - 1, 0), (990, 500)])
def test_tensors_that_overlap_or_lie_outside_are_refused(offsets):
    known = squeeze(np.array(offsets, np.uint32).tobytes() + bytes(1000 - 80))
    frame = Frame(FP8, 2, 2, 10, 1000, (known, squeeze(b""), squeeze(bytes(40))))
    with pytest.raises(Unverified, match="overlap"):
        decode_block(FP8, memoryview(frame.pack()), 1000)

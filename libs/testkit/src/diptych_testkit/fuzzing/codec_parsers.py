"""Encoded KV blocks and the blobs they are made of, as a hostile writer may send them."""

import struct
from functools import cache
from random import Random

import numpy as np

from diptych_contracts.cards import KvLayout
from diptych_contracts.codecs import CODECS, RAW
from diptych_contracts.ids import TransferId
from diptych_contracts.jobs import BlockDigest
from diptych_kvlink.codecs import decode_block, encode_block
from diptych_kvlink.packing import Packing
from diptych_testkit.fuzzing.bending import bent_bytes
from diptych_testkit.fuzzing.cases import Parser

_LAYERS, _ROWS, _DIM = 3, 16, 64
_LAYOUT = KvLayout(
    layout_id="llama-seq-v1",
    engine_build="1",
    block_tokens=_ROWS,
    slot_bytes=1 << 16,
    dtype="f16",
)
_CODECS = tuple(codec for codec in CODECS if codec != RAW)


def parsers() -> list[Parser]:
    """All of them."""
    return [
        Parser(name="kv-codes", make=_code, read=_decode, cases=1500),
        Parser(name="kv-blobs", make=_blob, read=_encode, cases=500),
        Parser(name="kv-seals", make=_sealed, read=_open, cases=5000),
    ]


@cache
def _block() -> bytes:
    head = struct.pack("<4i", -1357628200, 34, 1, _ROWS)
    head += b"".join(struct.pack("<3i", position, 1, 34) for position in range(_ROWS))
    parts = [head, struct.pack("<4i", 0, _LAYERS, 0, 0)]
    numbers = np.random.default_rng(1).standard_normal((2 * _LAYERS, _ROWS, _DIM))
    for tensor in numbers.astype("<f2"):
        parts += [struct.pack("<iQ", 1, 2 * _DIM), tensor.tobytes()]
    return b"".join(parts)


@cache
def _coded(codec: str) -> bytes:
    coded = encode_block(codec, _LAYOUT, memoryview(_block()))
    assert coded is not None
    return coded


def _code(rng: Random) -> tuple[str, bytes, int]:
    codec = rng.choice(_CODECS)
    data = _coded(codec)
    if rng.random() < 0.5:  # What a head says of sizes, which memory must not follow.
        data = bent_bytes(rng, data[:32]) + data[32:]
    elif rng.random() < 0.95:
        data = bent_bytes(rng, data, [_coded(other) for other in _CODECS])
    size = rng.choice((len(_block()), len(_block()), len(_block()), 0, 1, 1 << 20))
    return codec, data, size


def _decode(case: tuple[str, bytes, int]) -> None:
    codec, data, size = case
    assert len(decode_block(codec, memoryview(data), size)) == size


def _blob(rng: Random) -> bytes:
    block = _block()
    at = rng.choice((32, 32 + 12 * _ROWS, len(block)))
    return bent_bytes(rng, block[:at]) + block[at:] if rng.random() < 0.9 else block


def _encode(blob: bytes) -> None:
    """Whatever an engine exports, what is encoded can be decoded, and is as long again."""
    for codec in _CODECS:
        coded = encode_block(codec, _LAYOUT, memoryview(blob))
        if coded is not None:
            assert len(coded) < len(blob)
            assert len(decode_block(codec, memoryview(coded), len(blob))) == len(blob)


def _sealed(rng: Random) -> tuple[bytes, bytes, bytes]:
    key = bytes(32)
    return bent_bytes(rng, bytes(200)), bent_bytes(rng, bytes(28))[:64], key


def _open(case: tuple[bytes, bytes, bytes]) -> None:
    """Nothing that nobody has sealed is ever opened."""
    data, seal, key = case
    packing = Packing(TransferId("r1.1"), _LAYOUT, RAW, key)
    digest = BlockDigest(index=0, n_bytes=len(data), checksum=0, seal=seal)
    packing.unpack(memoryview(data), digest)
    raise AssertionError("a block that was never sealed was opened")

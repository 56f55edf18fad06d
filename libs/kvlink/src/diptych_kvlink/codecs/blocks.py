"""One block, encoded and decoded, by the name of the codec."""

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import KvLayout
from diptych_contracts.codecs import CODECS, FP8, INT8, LOSSLESS, RAW
from diptych_kvlink.codecs.entropy import squeeze, unsqueeze
from diptych_kvlink.codecs.frame import Frame, bad
from diptych_kvlink.codecs.quantizing import (
    Quantized,
    from_channels,
    from_tokens,
    per_channel,
    per_token,
)
from diptych_kvlink.codecs.tensors import Tensors, find_tensors

_INT8_LEVELS = 24.0
_DELTA_LEVELS = (6.0, 4.5, 3.5)
"""Steps to a standard deviation in the first, second and last third of the layers: what is lost
early goes through more layers (CacheGen)."""
_GROUP = 64
"""Channels of a token that share a step, where a row is made of such."""
_LARGEST_E5M2 = np.uint16(0x7B00)
"""Its bits, as the upper half of an f16: 57,344."""


def encode_block(codec: str, layout: KvLayout, block: memoryview) -> bytes | None:
    """`block` encoded; None: as it is it is as good, for it is not understood or not smaller."""
    if codec not in CODECS or codec == RAW or not block.nbytes:
        return None
    frame = _lossless(block) if codec == LOSSLESS else _lossy(codec, layout, block)
    if frame is None:
        return None
    data = frame.pack()
    return data if len(data) < block.nbytes else None


def decode_block(codec: str, data: memoryview, block_bytes: int) -> bytearray:
    """The `block_bytes` that `codec` was given, or near to them.

    Takes a small multiple of that in memory, whatever `data` is.

    Raises:
        Unverified: `data` is not such a block.
    """
    frame = Frame.unpack(data)
    if frame.codec != codec or frame.block_bytes != block_bytes:
        raise bad(
            f"expected {block_bytes} bytes by codec {codec}, "
            f"got {frame.block_bytes} by {frame.codec}"
        )
    return _joined(frame) if codec == LOSSLESS else _numbers(frame)


def _lossless(block: memoryview) -> Frame:
    """Sign and exponent of an f16 are worth compressing, the rest is noise: so halves apart."""
    halves = np.frombuffer(block, np.uint8)
    parts = (b"", squeeze(halves[0::2].tobytes()), squeeze(halves[1::2].tobytes()))
    return Frame(LOSSLESS, 0, 0, 0, block.nbytes, parts)


def _joined(frame: Frame) -> bytearray:
    if frame.tensors or frame.parts[0]:
        raise bad("tensors in a block that was compressed as it is")
    block = bytearray(frame.block_bytes)
    halves = np.frombuffer(block, np.uint8)
    for start in (0, 1):
        half = halves[start::2]
        half[:] = np.frombuffer(unsqueeze(_view(frame, 1 + start), len(half)), np.uint8)
    return block


def _lossy(codec: str, layout: KvLayout, block: memoryview) -> Frame | None:
    tensors = find_tensors(layout, block)
    if tensors is None:
        return None
    numbers = tensors.gather(block)
    if not np.isfinite(numbers).all():
        return None
    between = b"".join(block[start:end] for start, end in tensors.between(block.nbytes))
    steps, symbols = _encoded(codec, numbers)
    return Frame(
        codec,
        len(tensors.offsets),
        tensors.rows,
        tensors.dim,
        block.nbytes,
        (squeeze(tensors.offsets.tobytes() + between), squeeze(steps), squeeze(symbols)),
    )


def _numbers(frame: Frame) -> bytearray:
    count, dim = frame.tensors, frame.dim
    rest = frame.block_bytes - 2 * count * frame.rows * dim
    if not count or count % 2 or not frame.rows * dim or rest < 0:
        raise bad(f"{count} tensors of {frame.rows} x {dim} in {frame.block_bytes} bytes")
    known = unsqueeze(_view(frame, 0), 4 * count + rest)
    tensors = Tensors(frame.rows, dim, np.frombuffer(known, np.uint32, count))
    if not tensors.fit(frame.block_bytes):
        raise bad("tensors that overlap, or lie outside of their block")
    block = bytearray(frame.block_bytes)
    at = 4 * count
    for start, end in tensors.between(frame.block_bytes):
        block[start:end] = known[at : at + end - start]
        at += end - start
    tensors.scatter(_decoded(frame), block)
    return block


def _encoded(codec: str, numbers: NDArray[np.float16]) -> tuple[bytes, bytes]:
    """Steps and anchors, and the symbols."""
    half = len(numbers) // 2
    match codec:
        case "fp8":
            return b"", _to_e5m2(numbers).tobytes()
        case "int8":
            levels = np.full(half, _INT8_LEVELS, np.float32)
            keys = per_channel(numbers[:half], levels)
            values = per_token(numbers[half:], levels, _group(numbers.shape[2]))
        case _:
            levels = _delta_levels(half)
            keys = per_channel(numbers[:half], levels)
            values = per_channel(numbers[half:], levels)
    steps = b"".join(
        (
            *(part.steps.tobytes() for part in (keys, values)),
            *(_planes(part.anchors) for part in (keys, values)),
        )
    )
    return steps, keys.symbols.tobytes() + values.symbols.tobytes()


def _decoded(frame: Frame) -> NDArray[np.float16]:
    """The numbers `[tensor, row, dim]`."""
    half, rows, dim = frame.tensors // 2, frame.rows, frame.dim
    shape = (frame.tensors, rows, dim)
    symbols = np.frombuffer(unsqueeze(_view(frame, 2), frame.tensors * rows * dim), np.int8)
    symbols = symbols.reshape(shape)
    if frame.codec == FP8:
        unsqueeze(_view(frame, 1), 0)
        return (symbols.view(np.uint8).astype(np.uint16) << 8).view("<f2")
    channels, groups = half * dim, half * rows * (dim // _group(dim))
    by_token = frame.codec == INT8
    n_steps = channels + (groups if by_token else channels)
    n_anchors = channels if by_token else 2 * channels
    known = unsqueeze(_view(frame, 1), n_steps + 2 * n_anchors)
    steps = np.frombuffer(known, np.uint8, n_steps)
    anchors = _from_planes(known[n_steps:], channels)
    found = np.empty(shape, "<f2")
    found[:half] = from_channels(
        Quantized(
            symbols[:half], steps[:channels].reshape(half, dim), anchors[0].reshape(half, dim)
        )
    )
    if by_token:
        group = _group(dim)
        by_group = steps[channels:].reshape(half, rows, dim // group)
        found[half:] = from_tokens(Quantized(symbols[half:], by_group, anchors[0]), group)
    else:
        found[half:] = from_channels(
            Quantized(
                symbols[half:],
                steps[channels:].reshape(half, dim),
                anchors[1].reshape(half, dim),
            )
        )
    return found


def _delta_levels(layers: int) -> NDArray[np.float32]:
    third = np.minimum(np.arange(layers) * len(_DELTA_LEVELS) // layers, len(_DELTA_LEVELS) - 1)
    return np.array(_DELTA_LEVELS, np.float32)[third]


def _group(dim: int) -> int:
    return _GROUP if dim % _GROUP == 0 else dim


def _to_e5m2(numbers: NDArray[np.float16]) -> NDArray[np.uint8]:
    """The upper half of each f16, rounded to nearest even."""
    bits = numbers.view(np.uint16)
    size = np.minimum(bits & np.uint16(0x7FFF), _LARGEST_E5M2)
    rounded = size + (np.uint16(0x7F) + ((size >> 8) & np.uint16(1)))
    signed: NDArray[np.uint16] = rounded | (bits & np.uint16(0x8000))
    return (signed >> 8).astype(np.uint8)


def _planes(anchors: NDArray[np.int16]) -> bytes:
    """Lower bytes first, then the upper ones, which are nearly all alike."""
    return anchors.astype("<i2").view(np.uint8).reshape(-1, 2).T.tobytes()


def _from_planes(data: bytes, count: int) -> list[NDArray[np.int16]]:
    planes = np.frombuffer(data, np.uint8).reshape(-1, 2, count)
    return [np.ascontiguousarray(pair.T).view("<i2").reshape(-1) for pair in planes]


def _view(frame: Frame, index: int) -> memoryview:
    return memoryview(frame.parts[index])

"""KV as small whole numbers: which step, which anchor, how many steps to a standard deviation.

A channel of K keeps near a mean of its own, and some channels are far larger than the rest; V has
no such channels (KIVI, arXiv 2402.02750). So K is quantized per channel over the tokens of a block,
as what differs from the channel's anchor, and V per token.

The step is a share of the *deviation* rather than of the peak: all channels then have one
distribution, whose entropy is log2(levels) + 2.05 bits, and one Huffman table serves them all. A
channel with outliers gets a coarser step, so that nothing is ever clipped.

Steps are powers of 2 ** (1/8), one byte each; anchors whole numbers of steps, so that decoding is
one multiplication: `(symbol + anchor) * step`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PEAK = 126.0
"""Largest symbol, less one for the rounding of the anchor."""
_MOST_ANCHOR = 32_000.0
_STEPS_PER_OCTAVE = 8
_STEP_OF_ONE = 160
"""The code of step 1: codes 0 to 255 are 2 ** -20 to 2 ** 11.9."""
_LARGEST = np.float32(65504)
"""Of f16: a rounded step beyond it would be infinite."""
_CHUNK = 8
"""Tensors worked on at once: what is in between takes 64 bits a number."""

Floats = NDArray[np.float32]


class Quantized(NamedTuple):
    """Symbols with what gives them meaning back."""

    symbols: NDArray[np.int8]
    steps: NDArray[np.uint8]
    anchors: NDArray[np.int16]


def per_channel(numbers: NDArray[np.float16], levels: Floats) -> Quantized:
    """Differences from each channel's anchor; `numbers` are `[tensor, row, dim]`.

    `levels`: steps to a standard deviation, of each tensor.
    """
    parts = [
        _channels(numbers[at : at + _CHUNK].astype(np.float32), levels[at : at + _CHUNK])
        for at in range(0, len(numbers), _CHUNK)
    ]
    return Quantized(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def from_channels(given: Quantized) -> NDArray[np.float16]:
    """What `per_channel` was given, nearly."""
    found = np.empty(given.symbols.shape, "<f2")
    for at in range(0, len(found), _CHUNK):
        part = slice(at, at + _CHUNK)
        whole = given.symbols[part].astype(np.float32)
        whole += given.anchors[part, None, :]
        whole *= _size_of(given.steps[part])[:, None, :]
        found[part] = np.clip(whole, -_LARGEST, _LARGEST, out=whole)
    return found


def per_token(numbers: NDArray[np.float16], levels: Floats, group: int) -> Quantized:
    """Each token's channels by groups of `group`, without anchors."""
    tensors, rows, dim = numbers.shape
    parts = [
        _tokens(
            numbers[at : at + _CHUNK].astype(np.float32).reshape(-1, rows, dim // group, group),
            levels[at : at + _CHUNK],
        )
        for at in range(0, tensors, _CHUNK)
    ]
    symbols = np.concatenate([part.symbols for part in parts])
    steps = np.concatenate([part.steps for part in parts])
    return Quantized(symbols.reshape(numbers.shape), steps, np.empty(0, np.int16))


def from_tokens(given: Quantized, group: int) -> NDArray[np.float16]:
    """What `per_token` was given, nearly."""
    tensors, rows, dim = given.symbols.shape
    found = np.empty((tensors, rows, dim // group, group), "<f2")
    symbols = given.symbols.reshape(found.shape)
    for at in range(0, tensors, _CHUNK):
        part = slice(at, at + _CHUNK)
        whole = symbols[part].astype(np.float32)
        whole *= _size_of(given.steps[part])[..., None]
        found[part] = np.clip(whole, -_LARGEST, _LARGEST, out=whole)
    return found.reshape(given.symbols.shape)


def _channels(numbers: Floats, levels: Floats) -> Quantized:
    mean = numbers.mean(axis=1, keepdims=True)
    peak = np.maximum(numbers.max(axis=1) - mean[:, 0], mean[:, 0] - numbers.min(axis=1))
    deviation = numbers - mean
    spread = np.sqrt(np.einsum("tij,tij->tj", deviation, deviation) / numbers.shape[1])
    least = np.maximum(peak / _PEAK, np.abs(mean[:, 0]) / _MOST_ANCHOR)
    steps = _step_of(np.maximum(spread / levels[:, None], least))
    per_step = 1 / _size_of(steps)
    anchors = np.rint(mean[:, 0] * per_step)
    numbers *= per_step[:, None, :]
    np.rint(numbers, out=numbers)
    numbers -= anchors[:, None, :]
    return Quantized(_symbols(numbers), steps, anchors.astype(np.int16))


def _tokens(numbers: Floats, levels: Floats) -> Quantized:
    spread = np.sqrt(np.einsum("tigj,tigj->tig", numbers, numbers) / numbers.shape[3])
    peak = np.abs(numbers).max(axis=3)
    steps = _step_of(np.maximum(spread / levels[:, None, None], peak / _PEAK))
    numbers *= (1 / _size_of(steps))[..., None]
    np.rint(numbers, out=numbers)
    return Quantized(_symbols(numbers), steps, np.empty(0, np.int16))


def _symbols(numbers: Floats) -> NDArray[np.int8]:
    np.clip(numbers, -127, 127, out=numbers)
    return numbers.astype(np.int8)


def _step_of(least: Floats) -> NDArray[np.uint8]:
    """The code of the smallest step that is no smaller."""
    tiny = np.maximum(least, np.float32(2.0**-30))
    codes = np.ceil(np.log2(tiny) * _STEPS_PER_OCTAVE) + _STEP_OF_ONE
    found: NDArray[np.uint8] = np.clip(codes, 0, 255).astype(np.uint8)
    return found


_SIZES = np.exp2((np.arange(256) - _STEP_OF_ONE) / _STEPS_PER_OCTAVE).astype(np.float32)


def _size_of(codes: NDArray[np.uint8]) -> Floats:
    sizes: Floats = _SIZES[codes]
    return sizes

"""Bytes, text and trees of values, bent: what a careless or hostile sender makes of good ones."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

_LENGTHS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63),
    *(-(2**63), 2**64 - 1, 10**30, -0.0, 0.5, 1e-300, 1e308, -1e308, 1.0000000001),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", " ", "\0", "\n", "a" * 300, "é" * 70, "\u202e", "\ufeff", "\U0001f600", "e\u0301" * 20),
    *("*", ">", "a.b", "../../etc/passwd", "%00", "null", "true", "NaN", "{}", "[", '"', "\\"),
    *("<|im_end|>", "<tool_call>", "{{ 7 * 7 }}", "{% for x in y %}", "$ref", "#/", "\ue000"),
    *("\ud800", "\x7f", "\r\n", "0" * 40, "1e999", "-", "type", "function", "\uffff"),
)
WHOLE_TEXTS = tuple(text for text in TEXTS if text != "\ud800")
"""Where halves of characters cannot come from: JSON, and whatever was UTF-8, has none."""
MAX_TREE = 2_000_000
"""Characters and nodes of a bent tree; more tests nothing but the patience of who makes it."""
Bend = Callable[[Random, bytes], bytes]


def bent_bytes(rng: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """`data` with some of its bytes flipped, cut, doubled, moved or replaced."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        data = rng.choice(_BENDS)(rng, data)
        if others and rng.random() < 0.1:
            data = _spliced(rng, data, rng.choice(others))
    return data


def _flipped(rng: Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 16))):
        if made:
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    return bytes(made)


def _replaced(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = rng.choice((rng.randbytes(rng.randrange(1, 9)), b"\0", b"\xff" * 8, b'"', b"[" * 40))
    return data[:at] + piece + data[at + rng.choice((0, len(piece))) :]


def _cut(rng: Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _left_out(rng: Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 4, 8, 64)) :]


def _doubled(rng: Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.choice((1, 4, 32, 500))]
    return data[:start] + piece * rng.choice((2, 3, 100)) + data[start + len(piece) :]


def _length(rng: Random, data: bytes) -> bytes:
    """A number somewhere, as a length field has it."""
    width = rng.choice((1, 2, 4, 8))
    number = rng.choice(_LENGTHS) & ((1 << 8 * width) - 1)
    at = rng.randrange(max(1, len(data) - width))
    made = number.to_bytes(width, "little")
    return data[:at] + (made if rng.random() < 0.5 else made[::-1]) + data[at + width :]


def _spliced(rng: Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


_BENDS: tuple[Bend, ...] = (_flipped, _replaced, _cut, _left_out, _doubled, _length)


def bent_text(rng: Random, text: str, words: Sequence[str]) -> str:
    """`text` with pieces cut, doubled, moved, or put among `words`."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        start, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        match rng.randrange(5):
            case 0:
                text = text[:start]
            case 1:
                text = text[:start] + text[end:]
            case 2:
                text = text[:end] + text[start:end] * rng.choice((1, 2, 30)) + text[end:]
                text = text[:200_000]
            case 3:
                text = text[:start] + rng.choice(TEXTS) + text[start:]
            case _:
                text = text[:start] + rng.choice(words) * rng.choice((1, 1, 2, 50)) + text[start:]
    return text


def bent_tree(rng: Random, value: Any, names: Sequence[str] = ()) -> Any:
    """A tree of dicts, lists and scalars with some of its nodes replaced, moved or nested."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        bent = _bent_once(rng, value, names, rng.choice((0.1, 0.3, 0.6)))
        if _size(bent, MAX_TREE) > MAX_TREE:
            break  # repeated repetitions: to write it down would take minutes
        value = bent
    return value


def _size(value: Any, limit: int) -> int:
    """Characters and nodes of a tree, counted as often as they stand in it, up to `limit`."""
    size, waiting = 0, [value]
    while waiting and size <= limit:
        match waiting.pop():
            case str() as text:
                size += 1 + len(text)
            case dict() as made:
                size += 1
                waiting += [*made, *made.values()]
            case list() | tuple() as items:
                size += 1
                waiting += items
            case _:
                size += 1
    return size


def _bent_once(rng: Random, value: Any, names: Sequence[str], here: float) -> Any:
    if not isinstance(value, dict | list | tuple) or not value or rng.random() < here:
        return _other(rng, value, names)
    if isinstance(value, dict):
        made = dict(value)
        key = rng.choice(list(made))
        match rng.randrange(10):
            case 0:
                del made[key]
            case 1:
                made[rng.choice((*names, *TEXTS))] = made[key]
            case 2:
                made[rng.choice((*names, key))] = _other(rng, made[key], names)
            case 3:
                made[key] = made[rng.choice(list(made))]
            case _:
                made[key] = _bent_once(rng, made[key], names, here)
        return made
    items = list(value)
    at = rng.randrange(len(items))
    match rng.randrange(8):
        case 0:
            del items[at]
        case 1:
            items[at:at] = [items[at]] * rng.choice((1, 2, 40, 3000))
        case 2:
            items[at] = items[rng.randrange(len(items))]
        case _:
            items[at] = _bent_once(rng, items[at], names, here)
    return items


def _other(rng: Random, value: Any, names: Sequence[str]) -> Any:
    match rng.randrange(9):
        case 0:
            return rng.choice((None, True, False))
        case 1 | 2:
            return rng.choice(NUMBERS)
        case 3 | 4:
            return rng.choice((*TEXTS, *names))
        case 5:
            return rng.choice(([], {}, [value], {"type": value}, [[]], [None], {"": {}}))
        case 6:
            return nested(value, rng.choice((2, 20, 60, 70, 300)), rng.choice(("list", "dict")))
        case 7:
            return value + rng.choice(TEXTS) if isinstance(value, str) else str(value)[:2000]
        case _:
            return value[:2000] * rng.choice((3, 900)) if isinstance(value, str) else [value] * 9


def nested(value: Any, levels: int, kind: str) -> Any:
    """`value` inside of so many lists or dicts."""
    for _ in range(levels):
        value = [value] if kind == "list" else {"properties": value}
    return value


def as_json(rng: Random, value: Any) -> bytes:
    """`value` as some client may write it: NaN, lone halves of characters and all."""
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, default=repr)
    except (RecursionError, ValueError):
        return b"[" * 4000
    return text.encode("utf-8", rng.choice(("surrogatepass", "replace")))

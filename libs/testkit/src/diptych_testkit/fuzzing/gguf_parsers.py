"""Weights from anywhere: the header of a GGUF file, and the card that is made of it."""

import struct
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.gguf_header import GgufHeader, read_header
from diptych_testkit.fuzzing.bending import TEXTS, bent_bytes, bent_tree
from diptych_testkit.fuzzing.cases import Parser
from diptych_testkit.tiny_gguf import write_tiny_gguf

_LENGTHS = (0, 1, 13, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 1)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}


def parsers() -> list[Parser]:
    """Both."""
    return [
        Parser(name="gguf", make=_damaged, read=_header, cases=400),
        Parser(name="gguf-cards", make=_written, read=_header, cases=150),
    ]


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="diptych-fuzz-")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[Any] = []


@cache
def _tiny() -> tuple[bytes, GgufHeader]:
    path = write_tiny_gguf(_folder() / "tiny.gguf")
    return path.read_bytes(), read_header(path)


def _damaged(rng: Random) -> bytes:
    """The tiny model's file with its header bent anywhere, lengths and counts before all."""
    data, header = _tiny()
    end = header.tensors[0].offset
    head, rest = bytearray(data[:end]), data[end:]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.5:
            at = rng.choice((8, 16, rng.randrange(24, end - 8)))
            head[at : at + 8] = struct.pack("<Q", rng.choice(_LENGTHS))
        else:
            head = bytearray(bent_bytes(rng, bytes(head)))
    made = bytes(head) + rest
    return made[: rng.randrange(len(made))] if rng.random() < 0.1 else made


def _header(data: bytes) -> None:
    path = _folder() / "case.gguf"
    path.write_bytes(data)
    card_from_gguf(path, model="case")
    header = read_header(path)
    spans = sorted((t.offset, t.offset + t.n_bytes) for t in header.tensors)
    assert all(0 <= start <= stop <= len(data) for start, stop in spans)
    assert all(a[1] <= b[0] for a, b in pairwise(spans)), "tensors overlap"


def _written(rng: Random) -> bytes:
    """A file that is whole, its keys and tensors anything."""
    data, header = _tiny()
    metadata = _metadata(rng, header)
    if rng.random() < 0.25:
        metadata |= _sentencepiece(rng)
    tensors, start = _tensors(rng, header)
    return _file(metadata, tensors) + data[start:]


def _metadata(rng: Random, header: GgufHeader) -> dict[str, Any]:
    metadata = dict(header.metadata)
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice((*metadata, "general.alignment", "split.count"))
        value = metadata.get(key, 1)
        if isinstance(value, list) and rng.random() < 0.6:
            items = list(value)
            at = rng.randrange(len(items) or 1)
            items[at : at + 1] = [_odd(rng, items[at] if items else 0)] * rng.choice((0, 1, 1, 2))
            metadata[key] = items
        else:
            metadata[key] = _odd(rng, value)
        if rng.random() < 0.2:
            del metadata[rng.choice(list(metadata))]
    return metadata


def _tensors(rng: Random, header: GgufHeader) -> tuple[list[list[Any]], int]:
    tensors = [[t.name, list(t.shape), 8 if t.kind == "Q8_0" else 0, 0] for t in header.tensors]
    start = header.tensors[0].offset
    for row, tensor in zip(tensors, header.tensors, strict=True):
        row[3] = tensor.offset - start
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(len(tensors))
        match rng.randrange(5):
            case 0:
                tensors[at][3] = rng.choice((*_LENGTHS, 32, 33, tensors[at - 1][3]))
            case 1:
                tensors[at][1] = [rng.choice((0, 1, 7, 64, *_LENGTHS))] * rng.randrange(6)
            case 2:
                tensors[at][2] = rng.choice((0, 1, 2, 8, 14, 31, 36, 99, 2**32 - 1))
            case 3:
                tensors[at][0] = rng.choice((*TEXTS, "token_embd.weight", "output_norm.weight"))
            case _:
                tensors.append(list(tensors[at]))
    return tensors, start


def _odd(rng: Random, value: Any) -> Any:
    made = bent_tree(rng, value, ("llama", "gpt2", "{% for m in", "{{ 1 }}"))
    return made[:4000] if isinstance(made, list | str) else made


def _sentencepiece(rng: Random) -> dict[str, Any]:
    texts = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", rng.choice(("x" * 9, "y" * 20_000))]
    scores = [float(-n) for n in range(len(texts))]
    scores[5] = rng.choice((float("nan"), float("inf"), -0.0))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, rng.choice((1, 4, 6, 77, -1))],
        "tokenizer.ggml.unknown_token_id": rng.choice((0, 7, 8, -1, "x", 2.5, [0])),
        "tokenizer.ggml.add_space_prefix": rng.choice((True, False, "no", [])),
    }


def _file(metadata: dict[str, Any], tensors: list[list[Any]]) -> bytes:
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    out += [_text(name) + _value(value) for name, value in metadata.items()]
    for name, shape, kind, offset in tensors:
        out.append(_text(name) + struct.pack("<I", len(shape)))
        out.append(struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset))
    head = b"".join(out)
    return head + b"\0" * (-len(head) % 32)


def _text(text: Any) -> bytes:
    data = str(text).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _kind(value[0]) if value else 4
        if kind == 9 or any(_kind(item) != kind for item in value):
            kind, value = 8, [str(item)[:200] for item in value]
        head = struct.pack("<IIQ", 9, kind, len(value))
        return head + b"".join(_bare(kind, item) for item in value)
    kind = _kind(value)
    return struct.pack("<I", kind) + _bare(kind, value)


def _kind(value: Any) -> int:
    match value:
        case bool():
            return 7
        case int():
            return 5 if -(2**31) <= value < 2**31 else 11 if -(2**63) <= value < 2**63 else 8
        case float():
            return 12
        case list():
            return 9
        case _:
            return 8


def _bare(kind: int, value: Any) -> bytes:
    return _text(value) if kind == 8 else struct.pack(f"<{_SCALARS[kind]}", value)

"""What KV codecs save, take and lose: `python bench/codecs.py --model FILE.gguf`.

Size and speed are of full blocks of this model's KV over a text of this repository, on one core.
Loss is measured where it matters: a passage is prefilled once, its blocks go through each codec
into a sequence of their own, and all sequences are then fed the same continuation, so that their
perplexities and likeliest tokens can be compared; after that each goes on greedily by itself.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from diptych_contracts.codecs import CODECS, RAW
from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.llamacpp import LlamaCppEngine, LlamaCppSettings
from diptych_engine.port import KvBlock, StepInput
from diptych_kvlink.codecs import decode_block, encode_block
from diptych_kvlink.codecs.tensors import find_tensors
from diptych_text.codec import TextCodec

HALF = "50 % of blocks"
NAMES = (*CODECS, HALF)


@dataclass
class Seen:
    """What came of one codec."""

    raw_bytes: int = 0
    coded_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    nll: list[float] = field(default_factory=list)
    same_top: int = 0
    greedy: list[list[int]] = field(default_factory=list)


def main() -> None:
    asked = _arguments()
    card = card_from_gguf(asked.model, model="bench")
    card = msgspec.structs.replace(card, context_tokens=asked.prompt + 2 * asked.tokens + 8)
    text = "\n\n".join(path.read_text() for path in asked.text)
    ids = TextCodec.from_card(card).encode(text)
    room = (len(NAMES) + 1) * card.context_tokens
    settings = LlamaCppSettings(kv_tokens=room, max_sequences=len(NAMES), prefix_sequences=0)
    engine = LlamaCppEngine(asked.model, card, settings)
    seen = {name: Seen() for name in NAMES}
    stride = asked.prompt + asked.tokens
    passages = min(asked.passages, len(ids) // stride)
    for number in range(passages):
        passage = ids[number * stride : (number + 1) * stride]
        _passage(engine, passage[: asked.prompt], passage[asked.prompt :], asked.tokens, seen)
        print(f"passage {number + 1} of {passages}", flush=True)
    _print(seen, passages, asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    docs = Path(__file__).parents[1] / "docs"
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[docs / "architecture.md", docs / "security.md"]
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens, a multiple of 64")
    parser.add_argument("--tokens", type=int, default=64, help="fed, and then made, after it")
    parser.add_argument("--passages", type=int, default=8)
    return parser.parse_args()


def _passage(
    engine: LlamaCppEngine, prompt: list[int], then: list[int], tokens: int, seen: dict[str, Seen]
) -> None:
    blocks = list(_prefilled(engine, prompt[:-1]))
    for seq, name in enumerate(NAMES):
        for index, block in enumerate(blocks):
            given = _carried(engine, name, index, block, seen[name])
            engine.import_block(seq, given)
    at, fed = len(prompt) - 1, [prompt[-1]] * len(NAMES)
    for token in then:
        rows = _step(engine, at, fed)
        best = [int(row.argmax()) for row in rows]
        for name, row, top in zip(NAMES, rows, best, strict=True):
            seen[name].nll.append(_nll(row, token))
            seen[name].same_top += top == best[0]
        at, fed = at + 1, [token] * len(NAMES)
    answers: list[list[int]] = [[] for _ in NAMES]
    for _ in range(tokens):
        rows = _step(engine, at, fed)
        at, fed = at + 1, [int(row.argmax()) for row in rows]
        for answer, token in zip(answers, fed, strict=True):
            answer.append(token)
    for seq, (name, answer) in enumerate(zip(NAMES, answers, strict=True)):
        seen[name].greedy.append(answer)
        engine.drop(seq)


def _prefilled(engine: LlamaCppEngine, ids: list[int]) -> Iterator[KvBlock]:
    """The blocks of a prompt."""
    size = engine.spec.layout.block_tokens
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        engine.step([StepInput(seq=0, position=at, token_ids=part, want_logits=False)])
        out = memoryview(bytearray(engine.spec.layout.slot_bytes))
        n_bytes = engine.export_block(0, at, at + len(part), out)
        yield KvBlock(p0=at, p1=at + len(part), data=out[:n_bytes])
    engine.drop(0)


def _carried(engine: LlamaCppEngine, name: str, index: int, block: KvBlock, seen: Seen) -> KvBlock:
    """The block as it comes out at the other end."""
    layout, data = engine.spec.layout, block.data
    seen.raw_bytes += data.nbytes
    if name == HALF:
        seen.coded_bytes += 0 if index % 2 else data.nbytes
        return KvBlock(block.p0, block.p1, _emptied(engine, data)) if index % 2 else block
    began_s = time.thread_time()
    coded = encode_block(name, layout, data)
    seen.encode_s += time.thread_time() - began_s
    if coded is None:
        seen.coded_bytes += data.nbytes
        return block
    seen.coded_bytes += len(coded)
    began_s = time.thread_time()
    decoded = decode_block(name, memoryview(coded), data.nbytes)
    seen.decode_s += time.thread_time() - began_s
    return KvBlock(block.p0, block.p1, memoryview(decoded))


def _emptied(engine: LlamaCppEngine, data: memoryview) -> memoryview:
    """A block whose K and V are zero."""
    tensors = find_tensors(engine.spec.layout, data)
    assert tensors is not None
    made = bytearray(data)
    tensors.scatter(np.zeros((len(tensors.offsets), tensors.rows, tensors.dim), "<f2"), made)
    return memoryview(made)


def _step(engine: LlamaCppEngine, at: int, ids: list[int]) -> list[np.ndarray]:
    rows = engine.step(
        [
            StepInput(seq=seq, position=at, token_ids=[token], want_logits=True)
            for seq, token in enumerate(ids)
        ]
    )
    return [row.astype(np.float64) for row in rows if row is not None]


def _nll(row: np.ndarray, token: int) -> float:
    peak = row.max()
    return float(peak + np.log(np.exp(row - peak).sum()) - row[token])


def _print(seen: dict[str, Seen], passages: int, asked: argparse.Namespace) -> None:
    raw = seen[RAW]
    print(
        f"\n{passages} passages of {asked.prompt} tokens, {asked.tokens} fed and made after each\n"
    )
    print("| codec | x smaller | encode | decode | perplexity | same likeliest | same greedy |")
    print("|---|---|---|---|---|---|---|")
    base = math.exp(sum(raw.nll) / len(raw.nll))
    for name, one in seen.items():
        perplexity = math.exp(sum(one.nll) / len(one.nll))
        pairs = [
            a == b
            for mine, theirs in zip(one.greedy, raw.greedy, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        ]
        encode, decode = (
            f"{one.raw_bytes / took_s / 1e9:.2f} GB/s"
            if took_s and name not in (RAW, HALF)
            else "-"
            for took_s in (one.encode_s, one.decode_s)
        )
        print(
            f"| {name} | {one.raw_bytes / one.coded_bytes:.2f} | {encode} | {decode} "
            f"| {perplexity:.3f} ({perplexity / base - 1:+.2%}) "
            f"| {one.same_top / len(one.nll):.1%} | {sum(pairs) / len(pairs):.1%} |"
        )


if __name__ == "__main__":
    main()

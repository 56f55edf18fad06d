"""A model of 128 KB: a card with a real byte-level tokenizer, and a GGUF file llama.cpp loads.

Its weights are noise, so what it says is nonsense, but the same nonsense each time.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants
from numpy.typing import NDArray

from diptych_contracts.cards import Fingerprint, ModelCard
from diptych_engine.sim_card import BOS_ID, CHAT_TEMPLATE, CONTROL_TOKENS, EOS_ID, byte_letters
from diptych_text.gguf_tokenizer import tokenizer_json

CONTEXT_TOKENS = 2048
BLOCK_TOKENS = 64
_WORDS = ("the", "and", "ing", "Hello", "user", "assistant", "system", "Ġworld", "Ġa", "er", "on")
_SPECIAL = {
    "tokenizer.ggml.bos_token_id": BOS_ID,
    "tokenizer.ggml.eos_token_id": EOS_ID,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHAT_TEMPLATE,
}
_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _FORWARD = 2, 64, 2, 1, 96
_HEAD = _WIDTH // _HEADS


def tiny_metadata() -> dict[str, Any]:
    """The tokenizer part of the tiny model's GGUF metadata: 3 control tokens, 256 bytes, words."""
    tokens, merges = [*CONTROL_TOKENS, *byte_letters()], []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    kinds = [TokenType.CONTROL] * len(CONTROL_TOKENS)
    kinds += [TokenType.NORMAL] * (len(tokens) - len(kinds))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": merges,
    }


def tiny_card(*, model: str = "tiny", context_tokens: int = CONTEXT_TOKENS) -> ModelCard:
    """The tiny model's card: about 300 tokens, ids 0 to 2 control tokens, `<|im_end|>` the end."""
    metadata = tiny_metadata()
    return ModelCard(
        model=model,
        fingerprint=Fingerprint(base="tiny-base", weights="Q8_0"),
        context_tokens=context_tokens,
        block_tokens=BLOCK_TOKENS,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        eos_ids=(EOS_ID, 0),
        bos_id=BOS_ID,
        tokenizer_json=tokenizer_json(metadata),
        chat_template=CHAT_TEMPLATE,
        grammars=True,
    )


def write_tiny_gguf(path: Path, *, seed: int = 0, changes: Mapping[str, Any] | None = None) -> Path:
    """Write the tiny model (llama architecture, Q8_0) to `path` and give it back.

    Args:
        path: The file; overwritten.
        seed: Another seed is another model.
        changes: Metadata to replace, by full key; None drops a key. The embeddings follow the
            number of tokens.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_name(f"Tiny {seed}")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    metadata = {**tiny_metadata(), **_SPECIAL, **(changes or {})}
    _add_metadata(writer, metadata)
    for name, weights in _tensors(seed, vocab=len(metadata["tokenizer.ggml.tokens"])):
        if weights.ndim == 1:
            writer.add_tensor(name, weights)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        match value:
            case None:
                continue
            case str():
                writer.add_string(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case _:
                writer.add_array(key, value)


def _tensors(seed: int, *, vocab: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(seed)
    kv_width = _HEAD * _KV_HEADS

    def noise(*shape: int) -> NDArray[np.float32]:
        return rng.normal(0.0, 0.2, shape).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return (1.0 + noise(_WIDTH)).astype(np.float32)

    yield "token_embd.weight", noise(vocab, _WIDTH)
    yield "output_norm.weight", norm()
    for layer in range(_LAYERS):
        yield f"blk.{layer}.attn_norm.weight", norm()
        yield f"blk.{layer}.attn_q.weight", noise(_WIDTH, _WIDTH)
        yield f"blk.{layer}.attn_k.weight", noise(kv_width, _WIDTH)
        yield f"blk.{layer}.attn_v.weight", noise(kv_width, _WIDTH)
        yield f"blk.{layer}.attn_output.weight", noise(_WIDTH, _WIDTH)
        yield f"blk.{layer}.ffn_norm.weight", norm()
        yield f"blk.{layer}.ffn_gate.weight", noise(_FORWARD, _WIDTH)
        yield f"blk.{layer}.ffn_up.weight", noise(_FORWARD, _WIDTH)
        yield f"blk.{layer}.ffn_down.weight", noise(_WIDTH, _FORWARD)

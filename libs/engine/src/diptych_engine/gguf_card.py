"""A model card from a GGUF file: what a gateway, and a worker before it loads, need to know."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from diptych_contracts.cards import Fingerprint, ModelCard
from diptych_contracts.errors import Permanent
from diptych_engine.gguf_header import GgufHeader, TensorInfo, read_header
from diptych_text.codec import TextCodec
from diptych_text.gguf_tokenizer import TokenType, adds_bos, tokenizer_json

BLOCK_TOKENS = 64
"""Tokens of one KV block."""

# Decoders with one KV row per token and layer: what blocks of KV need. Recurrent and hybrid models
# and those with multi-axis RoPE have none, or none that can be cut.
ARCHITECTURES = frozenset(
    {"command-r", "exaone", "gemma", "gemma2", "gemma3", "granite", "llama", "olmo2", "phi2"}
    | {"phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "smollm3", "stablelm", "starcoder2"}
)

_END_TEXTS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>"),
    *("<|endoftext|>", "<EOT>", "</s>"),
)
"""Control tokens that end an answer even where the file names only one of them."""
_NOT_IDENTITY = ("context_length", "vocab_size")
"""Hyperparameters that some converters leave out and that change no KV."""
_MAX_LAYERS = 512
"""llama.cpp has room for so many, and ends the process for more."""
_SAMPLE_BYTES = 4096
_NORM_BYTES = 1024 * 1024
_SPM_DEFAULTS = {"bos": 1, "eos": 2}


def card_from_gguf(path: Path, *, model: str, context_tokens: int | None = None) -> ModelCard:
    """The card of the model in the GGUF file at `path`. Takes about 0.35 s for 49,000 tokens.

    The fingerprint's `base` hashes architecture, hyperparameters, tokenizer, and the norm weights:
    every quantization of a model keeps those in F32, while another model has others. A fine-tune
    that leaves the norms alone (LoRA) shares its `base`; its `weights` tell it apart: the file's
    precision, and a hash over the tensor table and the first 4 KiB of each tensor. Damage further
    on goes unseen: a checksum of the whole file is the downloader's task.

    Args:
        path: A whole, unsplit GGUF file.
        model: The id clients will ask for.
        context_tokens: Longest prompt plus answer; None: as long as the model was trained for.

    Raises:
        Permanent: one line that says what is wrong with the file, or with `context_tokens`.
    """
    header = read_header(path)
    architecture = _architecture(path, header)
    try:
        tokenizer = tokenizer_json(header.metadata)
        add_bos = adds_bos(header.metadata)
    except Permanent as err:
        raise Permanent(f"{path} has a tokenizer that cannot be used: {err}") from err
    _check_layers(path, header, architecture)
    tokens: list[str] = header.metadata["tokenizer.ggml.tokens"]
    _check_vocabulary(path, header, len(tokens))
    card = ModelCard(
        model=model,
        fingerprint=_fingerprint(path, header, architecture),
        context_tokens=_context(path, header, architecture, context_tokens),
        block_tokens=BLOCK_TOKENS,
        vocab_size=len(tokens),
        eos_ids=_eos_ids(path, header.metadata),
        bos_id=_token_id(path, header.metadata, "bos"),
        add_bos=add_bos,
        tokenizer_json=tokenizer,
        chat_template=_template(path, header.metadata),
        grammars=True,
        created_unix_s=int(path.stat().st_mtime),
    )
    _check_usable(path, card)
    return card


def _check_usable(path: Path, card: ModelCard) -> None:
    """A broken tokenizer or template must not reach a gateway."""
    try:
        TextCodec.from_card(card)
    except Permanent as err:
        raise Permanent(f"{path} cannot be used: {err}") from err


def _architecture(path: Path, header: GgufHeader) -> str:
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise Permanent(f"{path} is one part of a split model; join the parts first")
    if not header.tensors:
        raise Permanent(f"{path} holds no weights")
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise Permanent(f"{path} is of architecture {architecture!r:.60}; supported are {known}")
    return architecture


def _check_layers(path: Path, header: GgufHeader, architecture: str) -> None:
    layers = header.metadata.get(f"{architecture}.block_count")
    if not isinstance(layers, int) or not 1 <= layers <= _MAX_LAYERS:
        raise Permanent(
            f"{path} says {architecture}.block_count is {layers!r:.40}, expected 1 to {_MAX_LAYERS}"
        )


def _check_vocabulary(path: Path, header: GgufHeader, n_tokens: int) -> None:
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight" and tensor.shape[-1:] != (n_tokens,):
            raise Permanent(f"{path} has {n_tokens} tokens but embeddings of shape {tensor.shape}")


def _context(path: Path, header: GgufHeader, architecture: str, wanted: int | None) -> int:
    trained = header.metadata.get(f"{architecture}.context_length")
    if not isinstance(trained, int) or trained < 1:
        raise Permanent(f"{path} has no {architecture}.context_length")
    if wanted is None:
        return trained
    if not 1 <= wanted <= trained:
        raise Permanent(
            f"a context of {wanted} tokens was asked for; {path} was trained for 1 to {trained}"
        )
    return wanted


def _template(path: Path, metadata: Mapping[str, Any]) -> str:
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise Permanent(f"{path} has a tokenizer.chat_template that is not text")
    return template


def _token_id(path: Path, metadata: Mapping[str, Any], name: str) -> int | None:
    default = _SPM_DEFAULTS.get(name) if metadata["tokenizer.ggml.model"] == "llama" else None
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < n_tokens):
        raise Permanent(f"{path} says {name}_token_id is {token_id!r:.40}, of {n_tokens} tokens")
    return token_id


def _eos_ids(path: Path, metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, the one the file calls EOS first."""
    named = [_token_id(path, metadata, name) for name in ("eos", "eot", "eom")]
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    controls = {tokens[i]: i for i, kind in enumerate(kinds) if kind == TokenType.CONTROL}
    implied = [controls.get(text) for text in _END_TEXTS]
    found = dict.fromkeys(i for i in (*named, *implied) if i is not None)
    if not found:
        raise Permanent(f"{path} names no end-of-text token")
    return tuple(found)


def _fingerprint(path: Path, header: GgufHeader, architecture: str) -> Fingerprint:
    tokenizer = {k: v for k, v in header.metadata.items() if k.startswith("tokenizer.ggml.")}
    shape = {
        k: v
        for k, v in header.metadata.items()
        if k.startswith(f"{architecture}.") and not k.endswith(_NOT_IDENTITY)
    }
    named = msgspec.json.encode([architecture, sorted(shape.items()), sorted(tokenizer.items())])
    norms = [t for t in header.tensors if t.kind == "F32" and "norm" in t.name]
    table = [(t.name, t.kind, t.shape) for t in header.tensors]
    with path.open("rb") as file:
        base = _digest([named, *(_head(file, t, _NORM_BYTES) for t in norms)])
        samples = (_head(file, t, _SAMPLE_BYTES) for t in header.tensors)
        weights = _digest([msgspec.json.encode(table), *samples])
    return Fingerprint(base=base, weights=f"{_precision(header)}-{weights[:16]}")


def _precision(header: GgufHeader) -> str:
    """The kind of most weight bytes, leaving the embeddings out: `Q4_1`."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        if tensor.name.startswith("blk."):
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.n_bytes
    return max(sizes, key=lambda kind: sizes[kind], default=header.tensors[0].kind)


def _head(file: Any, tensor: TensorInfo, n_bytes: int) -> bytes:
    file.seek(tensor.offset)
    return bytes(file.read(min(n_bytes, tensor.n_bytes)))


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()

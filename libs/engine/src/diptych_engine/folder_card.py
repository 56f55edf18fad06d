"""A model card from a folder in Hugging Face's form: for engines that read such folders themselves.

What is read: `config.json`, `tokenizer.json`, `tokenizer_config.json`, and where they are there
`generation_config.json` and `chat_template.jinja`. Never the weights: their kind is the engine's to
say (`adapters.AdapterSettings.fingerprint`).
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from diptych_contracts.cards import Fingerprint, ModelCard
from diptych_contracts.errors import Permanent
from diptych_engine.gguf_card import BLOCK_TOKENS
from diptych_text.codec import TextCodec

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Of each file; the largest tokenizers have some 35 MB."""
_NOT_IDENTITY = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "vocab_size"}
    | {"quantization_config", "max_position_embeddings"}
)
"""Of the configuration: what says how the model is run, or by whom it was saved."""


def card_from_folder(folder: Path, *, model: str) -> ModelCard:
    """The card of the model in `folder`.

    The fingerprint's `base` hashes configuration and tokenizer. Weights are not looked at: two
    fine-tunes of one model that differ in nothing else need different names.

    Args:
        folder: With the files above.
        model: The id clients will ask for.

    Raises:
        Permanent: one line that says which file is wrong, and how.
    """
    config, names = _object(folder / "config.json"), _object(folder / "tokenizer_config.json")
    tokenizer = _text(folder / "tokenizer.json")
    ids = _ids_of(folder / "tokenizer.json", tokenizer)
    shape = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(shape, dict)
    bos = _token(names.get("bos_token"))
    card = ModelCard(
        model=model,
        fingerprint=Fingerprint(base=_base(config, tokenizer), weights="unread"),
        context_tokens=_whole(folder, shape, "max_position_embeddings"),
        block_tokens=BLOCK_TOKENS,
        vocab_size=max(_whole(folder, shape, "vocab_size"), 1 + max(ids.values())),
        eos_ids=_eos_ids(folder, config, names, ids),
        bos_id=ids.get(bos) if bos else None,
        add_bos=bool(names.get("add_bos_token", False)),
        tokenizer_json=tokenizer,
        chat_template=_template(folder, names),
        grammars=True,
        created_unix_s=int((folder / "config.json").stat().st_mtime),
    )
    try:
        TextCodec.from_card(card)
    except Permanent as err:
        raise Permanent(f"{folder} cannot be used: {err}") from err
    return card


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise Permanent(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
        return path.read_text("utf-8")
    except OSError as err:
        raise Permanent(f"cannot read {path}: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise Permanent(f"{path} is not in UTF-8") from err


def _object(path: Path, *, needed: bool = True) -> dict[str, Any]:
    if not needed and not path.exists():
        return {}
    try:
        return msgspec.json.decode(_text(path), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as err:
        raise Permanent(f"{path}: expected a JSON object: {err}") from err


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def _ids_of(path: Path, tokenizer: str) -> dict[str, int]:
    try:
        read = msgspec.json.decode(tokenizer, type=_Tokenizer)
    except (msgspec.DecodeError, RecursionError) as err:
        raise Permanent(f"{path}: expected a tokenizer with a vocabulary: {err}") from err
    ids = read.model.vocab | {added.content: added.id for added in read.added_tokens}
    if not ids:
        raise Permanent(f"{path} has no tokens")
    return ids


def _whole(folder: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Permanent(f"{folder / 'config.json'}: expected a positive {name}, saw {value!r:.40}")
    return value


def _token(value: object) -> str:
    """A token's text: as it is, or in an object with more about it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _eos_ids(
    folder: Path, config: Mapping[str, Any], names: Mapping[str, Any], ids: Mapping[str, int]
) -> tuple[int, ...]:
    """The tokens that end an answer, the tokenizer's own first."""
    generation = _object(folder / "generation_config.json", needed=False)
    found = [ids[text]] if (text := _token(names.get("eos_token"))) in ids else []
    for given in (generation.get("eos_token_id"), config.get("eos_token_id")):
        found += _listed(given)
    known = set(ids.values())
    found = [token for token in dict.fromkeys(found) if token in known]
    if not found:
        raise Permanent(f"{folder} names no end-of-text token of its tokenizer")
    return tuple(found)


def _listed(value: object) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _template(folder: Path, names: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return _text(path)
    template = names.get("chat_template", "")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default", "")
    if not isinstance(template, str):
        raise Permanent(f"{folder / 'tokenizer_config.json'} has a chat_template that is no text")
    return template


def _base(config: Mapping[str, Any], tokenizer: str) -> str:
    shape = sorted((k, v) for k, v in config.items() if k not in _NOT_IDENTITY)
    digest = hashlib.blake2b(digest_size=16)
    for piece in (msgspec.json.encode(shape), tokenizer.encode()):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()

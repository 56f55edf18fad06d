"""A `tokenizers` file from the metadata of a GGUF file.

Two families: byte-level BPE (`tokenizer.ggml.model` = `gpt2`) and SentencePiece BPE (`llama`).
The result gives the same ids as llama.cpp with `parse_special` on; a live test compares them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec

from diptych_contracts.errors import Permanent
from diptych_text.pretokenizing import as_json, word_cut

MAX_TOKEN_CHARS = 1024
"""Every way to cut a token of SentencePiece is tried: one of a megabyte would take hours. Real ones
have at most a few dozen characters."""
SPACE = "\u2581"
"""How SentencePiece writes a space."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
"""Types that are found in raw text as they stand."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file: text, type and (SentencePiece) score by id."""

    texts: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]

    def ids(self) -> dict[str, int]:
        """Id by text, of every token in use.

        Raises:
            Permanent: if one text stands for two ids: llama.cpp would abort the process. It cuts
                texts at a NUL, which can make two equal.
        """
        found: dict[str, int] = {}
        for index, text in enumerate(self.texts):
            if "\0" in text:
                raise Permanent(f"token {index} holds a NUL character")
            if len(text) > MAX_TOKEN_CHARS:
                raise Permanent(
                    f"token {index} has {len(text)} characters; {MAX_TOKEN_CHARS} are allowed"
                )
            if text and found.setdefault(text, index) != index:
                raise Permanent(f"token {text!r:.60} stands for ids {found[text]} and {index}")
        return {text: i for text, i in found.items() if self.types[i] != TokenType.UNUSED}

    def added(self) -> list[dict[str, Any]]:
        """The `added_tokens`: control tokens, and words that are never cut."""
        return [
            {
                "id": index,
                "content": self.texts[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != TokenType.USER_DEFINED,
            }
            for index, kind in enumerate(self.types)
            if kind in _ADDED and self.texts[index]
        ]


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """A `tokenizers` file for the tokenizer that GGUF `metadata` describes.

    Args:
        metadata: Values of a GGUF file by key (`tokenizer.ggml.*`); arrays as sequences.

    Raises:
        Permanent: for a tokenizer that is unknown, incomplete or inconsistent.
    """
    family = metadata.get("tokenizer.ggml.model")
    vocabulary = _vocabulary(metadata)
    if family == "gpt2":
        parts = _byte_level(metadata, vocabulary)
    elif family == "llama":
        parts = _sentencepiece(metadata, vocabulary)
    else:
        raise Permanent(f"tokenizer.ggml.model is {family!r:.80}; known are 'gpt2' and 'llama'")
    parts |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "post_processor": None,
    }
    return msgspec.json.encode(parts).decode()


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a prompt begins with BOS, as the file says or as its kind implies."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return word_cut(_pre_kind(metadata)).add_bos


def _pre_kind(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre") or "default")


def _vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    texts = _array(metadata, "tokens", str)
    if not texts:
        raise Permanent("tokenizer.ggml.tokens is missing or empty")
    types = _array(metadata, "token_type", int) or [TokenType.NORMAL] * len(texts)
    scores = _array(metadata, "scores", float) or [0.0] * len(texts)
    if not len(texts) == len(types) == len(scores):
        raise Permanent(
            f"tokenizer.ggml has {len(texts)} tokens, {len(types)} types and {len(scores)} scores"
        )
    return Vocabulary(texts, types, scores)


def _array(metadata: Mapping[str, Any], name: str, kind: type) -> Sequence[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return ()
    if not isinstance(values, list | tuple) or not all(isinstance(v, kind) for v in values):
        raise Permanent(f"tokenizer.ggml.{name} is not an array of {kind.__name__}")
    return values


def _byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    ids = vocabulary.ids()
    cut = word_cut(_pre_kind(metadata))
    model = _bpe(ids, list(_file_merges(metadata, ids)))
    model["ignore_merges"] = cut.whole_words_first
    return {
        "normalizer": None,
        "pre_tokenizer": as_json(cut),
        "model": model,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
    }


def _file_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    merges = _array(metadata, "merges", str)
    if not merges:
        raise Permanent("tokenizer.ggml.merges is missing or empty")
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise Permanent(f"merge {merge!r:.60} names a token that is not in the vocabulary")
        yield left, right


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    if not metadata.get("tokenizer.ggml.scores"):
        raise Permanent("tokenizer.ggml.scores is missing or empty")
    ids = vocabulary.ids()
    model = _bpe(ids, _scored_merges(vocabulary, ids))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(vocabulary.texts):
        raise Permanent(f"tokenizer.ggml.unknown_token_id is {unknown!r:.40}: no such token")
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": vocabulary.texts[unknown]}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = {"type": "Prepend", "prepend": SPACE}
    normalizers = (
        [prefix, replace] if metadata.get("tokenizer.ggml.add_space_prefix", True) else [replace]
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "model": model,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    }


def _scored_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the third's score deciding which comes first."""
    plain = {text for text, index in ids.items() if vocabulary.types[index] == TokenType.NORMAL}
    merges = [
        (-vocabulary.scores[ids[text]], ids[text], text[:cut], text[cut:])
        for text in plain
        for cut in range(1, len(text))
        if text[:cut] in plain and text[cut:] in plain
    ]
    merges.sort()
    return [(left, right) for _, _, left, right in merges]


def _bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
    }

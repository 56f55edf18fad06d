import json

import pytest
from tokenizers import Tokenizer

from diptych_contracts.errors import Permanent
from diptych_testkit.tiny_gguf import tiny_metadata
from diptych_text.gguf_tokenizer import TokenType, adds_bos, tokenizer_json
from diptych_text.pretokenizing import word_cut


def sentencepiece_metadata(**changes: object) -> dict[str, object]:
    words = ["▁", "h", "i", "t", "e", "hi", "▁hi", "th", "the", "▁the"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def tokens_of(metadata: dict[str, object], text: str) -> list[str]:
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata))
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


def test_byte_level_words_are_merged_and_control_tokens_found() -> None:
    tokens = tokens_of(tiny_metadata(), "<|im_start|>user\nHello world<|im_end|>")
    assert tokens == ["<|im_start|>", "user", "Ċ", "Hello", "Ġworld", "<|im_end|>"]


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("smollm", ["a", "1", "2", "3", "4", "Ġ", "!", "!"]),
        ("gpt-2", ["a", "1", "2", "3", "4", "Ġ", "!", "!"]),
        ("qwen2", ["a", "1", "2", "3", "4", "Ġ", "!", "!"]),
        ("llama-bpe", ["a", "123", "4", "Ġ", "!", "!"]),
        ("default", ["a", "123", "4", "Ġ", "!", "!"]),
    ],
)
def test_each_kind_cuts_words_as_its_model_was_trained(kind: str, pieces: list[str]) -> None:
    metadata = tiny_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    if "123" in pieces:
        tokens += ["12", "123"]
        metadata["tokenizer.ggml.token_type"] += [1, 1]
        metadata["tokenizer.ggml.merges"] += ["1 2", "12 3"]
    metadata["tokenizer.ggml.pre"] = kind

    assert tokens_of(metadata, "a1234 !!") == pieces


def test_an_unknown_cut_is_refused_by_name() -> None:
    metadata = {**tiny_metadata(), "tokenizer.ggml.pre": "grok-9"}
    with pytest.raises(Permanent, match=r"tokenizer\.ggml\.pre is 'grok-9'; known kinds are"):
        tokenizer_json(metadata)


def test_a_file_without_a_cut_gets_the_default_one() -> None:
    metadata = tiny_metadata()
    del metadata["tokenizer.ggml.pre"]
    explicit = {**metadata, "tokenizer.ggml.pre": "default"}
    assert tokenizer_json(metadata) == tokenizer_json(explicit)


def test_an_unused_token_is_left_out_and_a_user_defined_one_found_whole() -> None:
    metadata = tiny_metadata()
    metadata["tokenizer.ggml.tokens"] += ["[PAD]", "<tool>"]
    metadata["tokenizer.ggml.token_type"] += [TokenType.UNUSED, TokenType.USER_DEFINED]

    file = json.loads(tokenizer_json(metadata))

    assert "[PAD]" not in file["model"]["vocab"]
    assert tokens_of(metadata, "a<tool>b") == ["a", "<tool>", "b"]
    assert [t["special"] for t in file["added_tokens"]] == [True, True, True, False]


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes() -> None:
    assert tokens_of(sentencepiece_metadata(), "hi the é") == [
        *("▁hi", "▁the", "▁", "<0xC3>", "<0xA9>")
    ]


def test_sentencepiece_prefixes_a_space_only_if_the_file_says_so() -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    assert tokens_of(metadata, "hi hi") == ["hi", "▁hi"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is None"),
        ({"tokenizer.ggml.tokens": []}, "tokens is missing or empty"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens is not an array of str"),
        ({"tokenizer.ggml.merges": None}, "merges is missing or empty"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "merge 'zz qq' names a token"),
        ({"tokenizer.ggml.merges": [1]}, "merges is not an array of str"),
        ({"tokenizer.ggml.token_type": [1]}, "293 tokens, 1 types and 293 scores"),
        ({"tokenizer.ggml.tokens": ["a"] * 293}, "token 'a' stands for ids 0 and 1"),
        ({"tokenizer.ggml.tokens": ["\0"] * 293}, "token 0 holds a NUL"),
        ({"tokenizer.ggml.tokens": ["a" * 1025] * 293}, "token 0 has 1025 characters; 1024 are"),
    ],
)
def test_an_inconsistent_byte_level_tokenizer_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(Permanent, match=message):
        tokenizer_json({**tiny_metadata(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.scores": []}, "scores is missing or empty"),
        ({"tokenizer.ggml.unknown_token_id": 9999}, "unknown_token_id is 9999"),
        ({"tokenizer.ggml.unknown_token_id": [0]}, r"unknown_token_id is \[0\]"),
        ({"tokenizer.ggml.unknown_token_id": "0"}, "unknown_token_id is '0'"),
    ],
)
def test_an_inconsistent_sentencepiece_tokenizer_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(Permanent, match=message):
        tokenizer_json(sentencepiece_metadata(**changes))


def test_whether_bos_is_added_follows_the_file_then_the_kind() -> None:
    assert not adds_bos(tiny_metadata())
    assert adds_bos({**tiny_metadata(), "tokenizer.ggml.pre": "llama-bpe"})
    assert adds_bos(sentencepiece_metadata())
    assert not adds_bos(sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": False}))
    assert word_cut("llama-bpe").whole_words_first

from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from diptych_contracts.errors import InvalidRequest
from diptych_engine.sim_card import byte_letters
from diptych_testkit.tiny_gguf import tiny_card
from diptych_text import cutting
from diptych_text.codec import TextCodec
from diptych_text.cutting import MAX_UNCUT_CHARS, Cutter
from diptych_text.gguf_tokenizer import TokenType, tokenizer_json
from diptych_text.pretokenizing import KINDS

CONTROL = ("<|end|>", "<|im_start|>", "<a b>")
LETTERS = "abcXYZ éß你好。,.;:'-_ \n\r\t  <|>im_start|end 0123456789 \u0301½Ⅷ $€ 🙂"
WORDS = (*CONTROL, " the ", "don't", " I'll", "'s", "\n\n", "  ", "f3", "3f", " a1b2 ")


def a_text(rng: Random, chars: int) -> str:
    text = ""
    while len(text) < chars:
        letters = "".join(rng.choices(LETTERS, k=rng.randint(1, 12)))
        text += rng.choice(WORDS) if rng.random() < 0.3 else letters
    return text


def greedy_tokenizer(kind: str) -> Tokenizer:
    """One whose words become one token wherever they may: any other cut gives other tokens."""
    rng = Random(7)
    letters = byte_letters()
    merges, tokens = [], [*CONTROL, *letters]
    for _ in range(3000):
        left, right = rng.choices(tokens[len(CONTROL) :], k=2)
        if len(left + right) <= 6 and left + right not in tokens:
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    kinds = [TokenType.CONTROL] * len(CONTROL) + [TokenType.NORMAL] * (len(tokens) - len(CONTROL))
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": merges,
    }
    return Tokenizer.from_str(tokenizer_json(metadata))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_parts_have_the_tokens_of_the_whole(kind: str) -> None:
    tokenizer, cutter, rng = greedy_tokenizer(kind), Cutter(CONTROL), Random(kind)

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    for _ in range(20):
        text = a_text(rng, 1000)
        parts = list(cutter.parts(text, chars=30))
        assert "".join(parts) == text
        assert len(parts) > 10
        assert [token for part in parts for token in ids(part)] == ids(text)


def test_no_token_is_cut_and_short_text_is_left_alone() -> None:
    cutter = Cutter(CONTROL)
    assert list(cutter.parts("", chars=4)) == [""]
    assert list(cutter.parts("a b", chars=4)) == ["a b"]
    assert list(cutter.parts("xx yy<a b>zz", chars=8)) == ["xx yy", "<a b>zz"]


def test_text_without_a_place_stays_whole() -> None:
    assert list(Cutter(()).parts("a" * 100, chars=10)) == ["a" * 100]
    found = list(Cutter(()).parts("a" * 100 + " b c", chars=10))
    assert found == ["a" * 100, " b c"]


def test_a_codec_gives_the_same_ids_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec.from_card(tiny_card(model="m"))
    text = "one two <|im_end|> three four " * 40
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    whole = codec.encode_chat(messages)
    monkeypatch.setattr(cutting.Cutter.parts, "__kwdefaults__", {"chars": 32})
    parts = list(codec.chat_parts(messages))
    assert len(parts) > 30
    assert [token for part in parts for token in part] == whole


def test_what_stands_together_is_bounded() -> None:
    codec = TextCodec.from_card(tiny_card(model="m"))
    with pytest.raises(InvalidRequest, match="expected words: 1000"):
        list(codec.chat_parts([{"role": "user", "content": "x" * MAX_UNCUT_CHARS}]))


def test_long_text_is_encoded_as_short_text_is() -> None:
    codec = TextCodec.from_card(tiny_card(model="m"))
    assert codec.encode("hello there " * 1000) == codec.encode("hello there ") * 1000
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        codec.encode("\ud800" + "x" * 10_000)

"""Tokens must be llama.cpp's own: other tokens mean worse answers without any error."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import cffi
import pytest

from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.llamacpp.declarations import DECLARATIONS
from diptych_engine.llamacpp.library import installed_library
from diptych_testkit.tiny_gguf import tiny_metadata, write_tiny_gguf
from diptych_text.codec import TextCodec
from diptych_text.pretokenizing import KINDS

_TOKENIZE = """
int32_t llama_tokenize(const void *vocab, const char *text, int32_t n_bytes, int32_t *tokens,
                       int32_t n_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const void *vocab, int32_t token, char *out, int32_t n_bytes,
                             int32_t lstrip, bool special);
bool llama_vocab_get_add_bos(const void *vocab);
bool llama_vocab_is_eog(const void *vocab, int32_t token);
"""

# Also texts a tokenizer never sees in a test of its own: every Unicode corner that has bitten one.
SAMPLES = (
    "What is the capital of France?",
    " leading space",
    "trailing space ",
    "a",
    " ",
    "  ",
    "   three before and after   ",
    "\n",
    "\n\n",
    "\n\n\n  \n indented",
    "\t\tdef f(x):\n\t\t\treturn x",
    "line\r\nline\r\n\r\n",
    "mixed \t \n \t whitespace \u00a0 no-break\u3000ideographic",
    "I'm, you're, he's, we'll, they've, I'd, don't",
    "I'M, YOU'RE, HE'S, WE'LL, THEY'VE, I'D, DON'T",
    "1 12 123 1234 12345 1234567890",
    "3.14159, 1,000,000 and 0x7fff_ffff",
    "Version 2.0.1-rc3+build.17",
    "Fran\u00e7ois na\u00efve caf\u00e9 d\u00e9j\u00e0 vu",
    "e\u0301 decomposed and \u00e9 composed",
    "Stra\u00dfe, \u00dcbergr\u00f6\u00dfe, \u00c4nderung",
    "\u00bfD\u00f3nde est\u00e1 la biblioteca?",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a \u0434\u0435\u043b\u0430?",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u039a\u03cc\u03c3\u03bc\u03b5",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8\u3002\u30ab\u30bf\u30ab\u30ca",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "Xin ch\u00e0o th\u1ebf gi\u1edbi",
    "Merhaba d\u00fcnya, I\u015f\u0131k \u0130stanbul",
    "\U0001f600 \U0001f980\U0001f680 emoji",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 flags \U0001f44d\U0001f3fd",
    "\u0661\u0662\u0663 arabic digits, \u2167 roman, \u00bd half, \u00b2 squared",
    "zero\u200bwidth\u200cjoiner\u200d\ufeffmark",
    "\u202eright to left\u202c",
    "replacement \ufffd character",
    "line\u2028separator\u0085next",
    "null \x00 and \x07 bell \x1b[0m",
    "\U0001d4d7\U0001d4ee\U0001d4f5\U0001d4f5\U0001d4f8 mathematical",
    "Z\u0351\u036b\u0343\u036a\u0302\u036bA\u0334L\u0300G\u0301O",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>",
    "<|im_end|><|im_end|>",
    "text<|endoftext|>text",
    "a <|im_end|> b",
    "<|im_sta rt|> <|im_end| <im_end>",
    "<<|im_start|>>",
    "<repo_name>x<file_sep>y<jupyter_code>",
    '{"key": [1, 2.5, null], "nested": {"a": "b"}}',
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';",
    "#include <stdio.h>\nint main(void) { return 0; }\n",
    "for (let i = 0; i < n; ++i) { a[i] ??= b?.c; }",
    "https://example.com/a/b?c=d&e=%20#f",
    "user.name+tag@example.co.uk",
    "$12.50 \u20ac9,99 \u00a31 \u00a52000",
    "!!!???...---***___~~~",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "supercalifragilisticexpialidocious",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "    " * 20 + "deep",
    "'",
    "''",
    "'s",
    " 's",
    "'S",
)


class Reference:
    """The vocabulary of a GGUF file, as llama.cpp reads it."""

    def __init__(self, path: Path) -> None:
        self._ffi: Any = cffi.FFI()
        self._ffi.cdef(DECLARATIONS + _TOKENIZE)
        self.lib: Any = self._ffi.dlopen(str(installed_library()))
        self._quiet = self._ffi.callback("void(int32_t, const char *, void *)", lambda *_: None)
        self.lib.llama_log_set(self._quiet, self._ffi.NULL)
        params = self.lib.llama_model_default_params()
        params.vocab_only = True
        self._model = self.lib.llama_model_load_from_file(str(path).encode(), params)
        assert self._model != self._ffi.NULL
        self.vocab = self.lib.llama_model_get_vocab(self._model)

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        data = text.encode()
        room = 2 * len(data) + 16
        out = self._ffi.new("int32_t[]", room)
        n = self.lib.llama_tokenize(self.vocab, data, len(data), out, room, False, parse_special)
        return list(out[0:n])

    def piece(self, token: int) -> bytes:
        out = self._ffi.new("char[]", 512)
        n = self.lib.llama_token_to_piece(self.vocab, token, out, 512, 0, False)
        return bytes(self._ffi.buffer(out, n))

    def close(self) -> None:
        self.lib.llama_model_free(self._model)
        self.lib.llama_log_set(self._ffi.NULL, self._ffi.NULL)


def random_texts(n: int) -> list[str]:
    rng = Random(11)
    pools = ["abcdefgh ETAOIN  ", "0123456789 .,", "\n\r\t  \u00a0\u3000", "éüñßøÅ"]
    pools += ["日本語漢字中文한국", "🦀👩👍🏽🇩🇪", "'s're'LL'd't ", "{}[]();:=+-*/<>|&^%$#@!~`"]
    pools += ["\u0301\u200d\ufeff\u2028\u0085"]
    texts = [
        "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 40))) for _ in range(n)
    ]
    planes = (range(1, 0x80), range(1, 0x3000), range(0xE000, 0x11000), range(0x10000, 0x1FFFF))
    texts += [
        "".join(chr(rng.choice(rng.choice(planes))) for _ in range(rng.randint(1, 20)))
        for _ in range(n)
    ]
    return texts


def assert_same(reference: Reference, path: Path, texts: list[str]) -> None:
    card = card_from_gguf(path, model="m")
    codec = TextCodec.from_card(card)
    for text in texts:
        ids = codec.encode(text, add_bos=False)
        assert ids == reference.encode(text), repr(text)
    for token in range(card.vocab_size):
        assert codec.token_bytes(token) == reference.piece(token), token
    assert card.add_bos == reference.lib.llama_vocab_get_add_bos(reference.vocab)
    assert all(reference.lib.llama_vocab_is_eog(reference.vocab, eos) for eos in card.eos_ids)


def byte_level_changes(kind: str) -> dict[str, Any]:
    metadata = tiny_metadata()
    metadata["tokenizer.ggml.tokens"] += ["12", "123", "<tool>"]
    metadata["tokenizer.ggml.token_type"] += [1, 1, 4]
    metadata["tokenizer.ggml.merges"] += ["1 2", "12 3"]
    return {**metadata, "tokenizer.ggml.pre": kind, "tokenizer.ggml.add_bos_token": None}


def sentencepiece_changes(*, add_space_prefix: bool) -> dict[str, Any]:
    words = ["▁t", "he", "▁the", "▁a", "in", "er", "▁in", "ing", "▁▁", "▁▁▁▁", "aa", "aaaa", "123"]
    words += sorted({c for text in SAMPLES for c in text.replace(" ", "▁") if c > "\0"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    n_special = len(tokens)
    tokens += ["<|im_start|>", "<|im_end|>", "<tool>", "    x"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words), 3, 3, 4, 4],
        "tokenizer.ggml.scores": [
            *([0.0] * 259),
            *(-float(rank) for rank in range(n_special - 259)),
            *([-1000.0] * 4),
        ],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
        "tokenizer.ggml.add_bos_token": None,
    }


@pytest.fixture
def reference_of() -> Iterator[Any]:
    opened: list[Reference] = []

    def open_reference(path: Path) -> Reference:
        opened.append(Reference(path))
        return opened[-1]

    yield open_reference
    for reference in opened:
        reference.close()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_byte_level_tokens_are_llama_cpps(kind: str, tmp_path: Path, reference_of: Any) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", changes=byte_level_changes(kind))
    assert_same(reference_of(path), path, [*SAMPLES, *random_texts(60)])


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_sentencepiece_tokens_are_llama_cpps(
    add_space_prefix: bool, tmp_path: Path, reference_of: Any
) -> None:
    changes = sentencepiece_changes(add_space_prefix=add_space_prefix)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", changes=changes)
    assert_same(reference_of(path), path, [*SAMPLES, *random_texts(60)])


@pytest.mark.live
def test_tokens_of_a_real_model_are_llama_cpps(reference_of: Any) -> None:
    path = Path(
        os.environ.get("DIPTYCH_TEST_GGUF")
        or "~/.cache/diptych/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    ).expanduser()
    assert path.is_file(), f"no model file at {path}: run `diptych models pull smollm2-135m`"
    assert_same(reference_of(path), path, [*SAMPLES, *random_texts(300)])


@pytest.mark.live
def test_what_clients_write_is_tokenized_as_llama_cpp_does_without_control_tokens(
    reference_of: Any,
) -> None:
    path = Path(
        os.environ.get("DIPTYCH_TEST_GGUF")
        or "~/.cache/diptych/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    ).expanduser()
    reference = reference_of(path)
    codec = TextCodec.from_card(card_from_gguf(path, model="m"))
    start, end = reference.encode("<|im_start|>"), reference.encode("<|im_end|>")
    for text in [*SAMPLES, *random_texts(100)]:
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": text}]
        ids = codec.encode_chat(messages)
        before = [*start, *reference.encode("system\na"), *end, *reference.encode("\n")]
        asked = reference.encode(f"user\n{text}", parse_special=False)
        after = [*end, *reference.encode("\n"), *start, *reference.encode("assistant\n")]
        assert ids == [*before, *start, *asked, *after], repr(text)
        if not any(token in text for token in codec.control_texts):
            assert ids == codec.encode(codec.render(messages))

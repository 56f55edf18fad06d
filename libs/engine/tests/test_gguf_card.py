import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import Permanent
from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.gguf_header import MAX_ELEMENTS, MAX_KEYS, MAX_TENSORS, read_header
from diptych_testkit.tiny_gguf import BOS_ID, CONTEXT_TOKENS, tiny_metadata, write_tiny_gguf
from diptych_text.codec import TextCodec


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def card(path: Path, **options: Any) -> ModelCard:
    return card_from_gguf(path, model="tiny", **options)


def patched(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


def test_a_card_says_what_the_file_says(tiny: Path) -> None:
    made = card(tiny)

    assert made.model == "tiny"
    assert made.context_tokens == CONTEXT_TOKENS
    assert made.vocab_size == len(tiny_metadata()["tokenizer.ggml.tokens"])
    assert made.eos_ids == (2, 0)
    assert (made.bos_id, made.add_bos) == (BOS_ID, False)
    assert made.fingerprint.weights.startswith("Q8_0-")
    text = TextCodec.from_card(made).render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_header_agrees_with_the_gguf_package(tiny: Path) -> None:
    from gguf import GGUFReader

    ours, theirs = read_header(tiny), GGUFReader(tiny)

    assert {f.name for f in theirs.fields.values() if not f.name.startswith("GGUF.")} == set(
        ours.metadata
    )
    for name, value in ours.metadata.items():
        assert theirs.fields[name].contents() == value
    assert [(t.name, t.tensor_type.name, t.n_bytes, t.data_offset) for t in theirs.tensors] == [
        (t.name, t.kind, t.n_bytes, t.offset) for t in ours.tensors
    ]


def test_the_same_weights_have_the_same_fingerprint(tiny: Path, tmp_path: Path) -> None:
    copy = write_tiny_gguf(tmp_path / "copy.gguf")
    assert card(copy).fingerprint == card(tiny).fingerprint


def test_another_model_of_the_same_shape_has_another_base(tiny: Path, tmp_path: Path) -> None:
    other = card(write_tiny_gguf(tmp_path / "other.gguf", seed=1))
    assert other.fingerprint.base != card(tiny).fingerprint.base
    assert other.fingerprint.weights != card(tiny).fingerprint.weights


def test_other_weights_between_equal_norms_share_the_base_only(tiny: Path) -> None:
    before = card(tiny).fingerprint
    down = next(t for t in read_header(tiny).tensors if t.name == "blk.1.ffn_down.weight")
    with tiny.open("r+b") as file:
        file.seek(down.offset)
        file.write(bytes(64))

    after = card(tiny).fingerprint

    assert after.base == before.base
    assert after.weights != before.weights


def test_another_tokenizer_is_another_base(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "o.gguf", changes={"tokenizer.ggml.pre": "gpt-2"})
    assert card(other).fingerprint.base != card(tiny).fingerprint.base


def test_a_shorter_context_can_be_asked_for(tiny: Path) -> None:
    assert card(tiny, context_tokens=512).context_tokens == 512
    for wanted in (0, CONTEXT_TOKENS + 1):
        with pytest.raises(Permanent, match=rf"context of {wanted} tokens was asked for"):
            card(tiny, context_tokens=wanted)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(Permanent, match=r"cannot read model file .*none\.gguf: No such file"):
        card(tmp_path / "none.gguf")
    with pytest.raises(Permanent, match=r"cannot read model file .*: Is a directory"):
        card(tmp_path)


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04 a zip file", b"\x00" * 4096])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(Permanent, match="is not a usable GGUF file: it does not begin with 'GGUF'"):
        card(path)


def test_a_file_cut_short_anywhere_is_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    header_bytes = min(t.offset for t in read_header(tiny).tensors)
    places = [*range(4, header_bytes, 97), *range(header_bytes, len(data), 9973), len(data) - 1]
    for place in places:
        cut.write_bytes(data[:place])
        with pytest.raises(Permanent, match="is not a usable GGUF file") as caught:
            card(cut)
        assert "\n" not in str(caught.value)


def test_a_file_damaged_anywhere_in_its_header_never_crashes(tiny: Path, tmp_path: Path) -> None:
    data = bytearray(tiny.read_bytes())
    damaged = tmp_path / "damaged.gguf"
    refused = taken = 0
    for place in range(0, min(t.offset for t in read_header(tiny).tensors), 61):
        changed = data.copy()
        changed[place : place + 8] = b"\xff" * 8
        damaged.write_bytes(changed)
        try:
            taken += card(damaged).vocab_size > 0
        except Permanent:
            refused += 1
    assert refused > 0
    assert taken > 0, "most of a header is names and numbers that any value suits"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version is 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "version is 50331648"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "no room for 1152921504606846976 tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "no room for 1152921504606846976 keys"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**63) + bytes(9), "would end before byte"),
    ],
)
def test_impossible_counts_are_refused_before_memory_is_taken(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(Permanent, match=message):
        read_header(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"general.architecture", b"general.architecturf", "architecture None"),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "architecture 'mamba'; supported"),
        (b"llama.context_length", b"llama.context_lengtX", r"no llama\.context_length"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenX", "tokenizer that cannot be used"),
        (b"smollm", b"unheard", "is not a usable GGUF file"),
    ],
)
def test_a_file_that_lacks_something_is_refused(
    tiny: Path, old: bytes, new: bytes, message: str
) -> None:
    with pytest.raises(Permanent, match=message):
        card(patched(tiny, old, new))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "unheard"}, r"tokenizer\.ggml\.pre is 'unheard'"),
        ({"tokenizer.ggml.merges": ["q1 q2"]}, "merge 'q1 q2' names a token"),
        ({"tokenizer.ggml.model": "rwkv"}, "model is 'rwkv'; known are"),
        ({"tokenizer.ggml.eot_token_id": 9999}, "eot_token_id is 9999, of 293 tokens"),
        (
            {"tokenizer.chat_template": "{% if"},
            r"x\.gguf cannot be used: the chat temp",
        ),
        ({"tokenizer.chat_template": 7}, r"a tokenizer\.chat_template that is not text"),
        ({"split.count": 3}, "one part of a split model"),
    ],
)
def test_an_unusable_file_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_tiny_gguf(tmp_path / "x.gguf", changes=changes)
    with pytest.raises(Permanent, match=message):
        card(path)


def test_other_embeddings_than_tokens_are_refused(tiny: Path) -> None:
    shape = struct.pack("<IQQ", 2, 64, 293)
    patched(tiny, shape, struct.pack("<IQQ", 2, 64, 292))
    with pytest.raises(Permanent, match=r"293 tokens but embeddings of shape \(64, 292\)"):
        card(tiny)


def test_a_vocabulary_without_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(Permanent, match="holds no weights"):
        card(path)


@pytest.mark.live
def test_a_real_file_becomes_a_card_fast_enough_to_start_a_worker() -> None:
    path = Path(
        os.environ.get("DIPTYCH_TEST_GGUF")
        or "~/.cache/diptych/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    ).expanduser()
    assert path.is_file(), f"no model file at {path}: run `diptych models pull smollm2-135m`"
    started_s = time.process_time()

    made = card(path)

    assert time.process_time() - started_s < 1.5
    assert (made.vocab_size, made.context_tokens, made.eos_ids) == (49152, 8192, (2, 0))
    assert made.fingerprint.weights.startswith("Q4_1-")


def test_more_keys_tensors_or_elements_than_any_model_has_are_refused(tmp_path: Path) -> None:
    """A byte of the file becomes eight and more of Python's: 256 MB would be gigabytes."""
    path = tmp_path / "x.gguf"
    key = struct.pack("<Q1sIIQ", 1, b"k", 9, 0, MAX_ELEMENTS + 1)
    for data, message in (
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, MAX_KEYS + 1) + bytes(10**6), "4097 keys more"),
        (struct.pack("<4sIQQ", b"GGUF", 3, MAX_TENSORS + 1, 0) + bytes(10**7), "65537 tensors"),
        (
            struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key + bytes(MAX_ELEMENTS + 1),
            "4000001 array elements more; at most 4000000 are read",
        ),
    ):
        path.write_bytes(data)
        with pytest.raises(Permanent, match=message):
            read_header(path)


def test_tensors_that_share_bytes_are_refused(tiny: Path) -> None:
    first, second, *_ = read_header(tiny).tensors
    start = first.offset
    old = struct.pack("<Q", second.offset - start)
    name = second.name.encode()
    data = tiny.read_bytes()
    at = data.index(old, data.index(name))
    tiny.write_bytes(data[:at] + struct.pack("<Q", 32) + data[at + 8 :])
    with pytest.raises(Permanent, match=f"'{first.name}' and '{second.name}' overlap"):
        read_header(tiny)


def test_an_architecture_is_text(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    arch = struct.pack("<IQ", 8, 5) + b"llama"
    listed = struct.pack("<IIQ", 9, 0, 1) + b"x"
    assert len(arch) == len(listed)
    tiny.write_bytes(data.replace(arch, listed, 1))
    with pytest.raises(Permanent, match=r"architecture \[120\]"):
        card(tiny)

from random import Random

import pytest

from diptych_text.detokenizing import Detokenizer


class ByteCodec:
    """Token n is byte n; 256 and up are control tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


def one_by_one(data: bytes) -> list[str]:
    detokenizer = Detokenizer(ByteCodec())
    return [*(detokenizer.push([byte]) for byte in data), detokenizer.finish()]


def test_a_character_appears_when_its_last_byte_has_come() -> None:
    assert one_by_one("a🦀é".encode()) == ["a", "", "", "", "🦀", "", "é", ""]


def test_an_unfinished_character_leaves_one_mark_at_the_end() -> None:
    assert one_by_one("a🦀".encode()[:-1]) == ["a", "", "", "", "\ufffd"]


def test_control_tokens_neither_show_nor_break_a_character() -> None:
    detokenizer = Detokenizer(ByteCodec())
    assert detokenizer.push([0xC3, 256, 0xA9, 300]) == "é"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_dealt_out_in_any_way_decode_as_at_once(seed: int) -> None:
    rng = Random(seed)
    valid = "aé🦀語".encode()
    data = bytes(rng.choice([rng.randrange(256), rng.choice(valid)]) for _ in range(200))
    detokenizer, shown, at = Detokenizer(ByteCodec()), "", 0
    while at < len(data):
        step = rng.randint(1, 7)
        shown += detokenizer.push(data[at : at + step])
        at += step

    assert shown + detokenizer.finish() == data.decode(errors="replace")
    assert "".join(one_by_one(data)) == data.decode(errors="replace")

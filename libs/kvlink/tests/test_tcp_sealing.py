"""Blocks on a TLS connection: what is sealed opens once, in its place, and whole."""

import os

import pytest

from diptych_contracts.errors import LinkBroken
from diptych_kvlink.tcp_sealing import PIECE_BYTES, TAG_BYTES, Opening, Sealing, new_key

SIZES = [1, 16_384, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7, 5]


def pieces(sealing: Sealing, blocks: list[bytes]) -> list[bytes]:
    """What crosses, cut where the reader cuts it."""
    crossing = sealing.sealed([memoryview(block) for block in blocks])
    crossed = memoryview(b"".join(bytes(part) for part in crossing))
    found = []
    for block in blocks:
        for at in range(0, len(block), PIECE_BYTES):
            n_bytes = min(PIECE_BYTES, len(block) - at) + TAG_BYTES
            found.append(bytes(crossed[:n_bytes]))
            crossed = crossed[n_bytes:]
    assert not crossed
    return found


def test_every_block_opens_as_it_was() -> None:
    key, blocks = new_key(), [os.urandom(size) for size in SIZES]
    sealing, opening = Sealing(key), Opening(key)
    for _ in range(2):  # A key lasts for many batches.
        opening.expect(SIZES)
        opened, into = b"", memoryview(bytearray(PIECE_BYTES))
        for piece in pieces(sealing, blocks):
            assert opening.next_bytes == len(piece)
            opened += into[: opening.open(memoryview(piece), into)]
        assert opened == b"".join(blocks)
        assert opening.next_bytes == 0


def test_equal_blocks_do_not_cross_as_equals() -> None:
    one, two = pieces(Sealing(new_key()), [b"x" * 1000, b"x" * 1000])
    assert one != two


@pytest.mark.parametrize("what", ["bit", "tag", "swapped", "doubled", "key"])
def test_what_is_not_the_next_piece_does_not_open(what: str) -> None:
    key = new_key()
    one, two = pieces(Sealing(key), [b"a" * 1000, b"b" * 1000])
    opening = Opening(new_key() if what == "key" else key)
    opening.expect([1000, 1000])
    into = memoryview(bytearray(1001))
    if what == "doubled":
        opening.open(memoryview(one), into)
    crossing = {
        "bit": bytes([one[0] ^ 1]) + one[1:],
        "tag": one[:-1] + bytes([one[-1] ^ 1]),
        "swapped": two,
        "doubled": one,
        "key": one,
    }[what]
    with pytest.raises(LinkBroken, match="altered on its way"):
        opening.open(memoryview(crossing), into)
    assert not any(into)

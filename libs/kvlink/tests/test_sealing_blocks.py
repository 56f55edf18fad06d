from dataclasses import replace

import msgspec
import numpy as np
import pytest

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import Unverified
from diptych_contracts.ids import TransferId
from diptych_kvlink.block_seal import SEAL_BYTES, new_key
from diptych_kvlink.packing import Packing
from diptych_kvlink.verifying import checksum

PAGED = KvLayout(
    layout_id="paged-v1",
    engine_build="b",
    block_tokens=16,
    slot_bytes=2 * 2 * 16 * 128 * 2,
    dtype="f16",
    layers=2,
    kv_heads=2,
    head_dim=64,
)
ID = TransferId("r1.1")
KEY = new_key()


def packing(codec="raw", key=KEY):
    return Packing(ID, PAGED, codec, key)


def packed(how, index=0):
    numbers = np.random.default_rng(3).standard_normal(PAGED.slot_bytes // 2)
    block = numbers.astype("<f2").tobytes()
    memory = memoryview(bytearray(block))
    made = how.pack(index, memory)
    return block, made, made.digest(salt=7)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("key", [b"", KEY], ids=["open", "sealed"])
def test_what_was_packed_comes_back(codec, key):
    how = packing(codec, key)
    block, made, digest = packed(how)
    assert how.is_plain == (codec == "raw" and not key)
    assert len(made.data) <= len(block)
    assert digest.n_bytes == len(made.data)
    assert digest.checksum == checksum(made.data, 7)
    assert (bytes(made.data) == bytes(block)) == how.is_plain
    assert how.unpack(made.data.toreadonly(), digest) == block


def test_a_sealed_block_tells_nothing_and_is_as_long():
    block, made, digest = packed(packing())
    assert len(made.data) == len(block)
    assert len(digest.seal) == SEAL_BYTES
    same = sum(a == b for a, b in zip(made.data, block, strict=True))
    assert same < len(block) / 50


def test_no_two_blocks_are_sealed_alike():
    how = packing()
    (_, one, first), (_, other, second) = packed(how), packed(how)
    assert bytes(one.data) != bytes(other.data)
    assert first.seal != second.seal


def test_another_key_opens_nothing():
    _, made, digest = packed(packing())
    with pytest.raises(Unverified, match="not sealed with this transfer's key") as seen:
        packing(key=new_key()).unpack(made.data, digest)
    assert seen.value.reason == "kv_seal"


@pytest.mark.parametrize("at", [0, 1000, -1])
def test_a_flipped_bit_is_noticed(at):
    _, made, digest = packed(packing())
    made.data[at] ^= 1
    with pytest.raises(Unverified, match="altered"):
        packing().unpack(made.data, digest)


@pytest.mark.parametrize("at", range(SEAL_BYTES))
def test_a_flipped_bit_of_nonce_or_tag_is_noticed(at):
    _, made, digest = packed(packing())
    seal = bytearray(digest.seal)
    seal[at] ^= 1
    with pytest.raises(Unverified, match="altered"):
        packing().unpack(made.data, msgspec.structs.replace(digest, seal=bytes(seal)))


@pytest.mark.parametrize(
    "changes", [{"index": 1}, {"raw_bytes": 5000}, {"seal": b""}, {"seal": bytes(27)}]
)
def test_a_block_cannot_stand_for_another(changes):
    _, made, digest = packed(packing())
    with pytest.raises(Unverified):
        packing().unpack(made.data, msgspec.structs.replace(digest, **changes))


def test_a_block_of_another_transfer_is_not_opened():
    _, made, digest = packed(packing())
    other = replace(packing(), transfer_id=TransferId("r2.1"))
    with pytest.raises(Unverified):
        other.unpack(made.data, digest)


def test_a_key_is_shown_nowhere():
    assert KEY.hex() not in repr(packing())
    assert repr(KEY) not in repr(packing())

import struct

import pytest

from diptych_contracts.errors import Unverified
from diptych_contracts.tiers import TierKey
from diptych_kvtiers import entry
from diptych_kvtiers.entry import HEAD_BYTES, SEAL_BYTES, Framer
from diptych_kvtiers.fleet_key import read_fleet_key
from diptych_testkit.tier_suite import tier_block, tier_key

KEY = bytes(range(32))


@pytest.mark.parametrize("fleet_key", [None, KEY])
@pytest.mark.parametrize("n_bytes", [0, 1, 100_000])
def test_what_is_framed_is_what_comes_out(fleet_key: bytes | None, n_bytes: int) -> None:
    framer = Framer(fleet_key)
    made = framer.framed(tier_key(1), tier_block(1, n_bytes))
    assert len(made) == n_bytes + framer.overhead_bytes
    assert bytes(framer.opened(tier_key(1), made)) == tier_block(1, n_bytes)
    assert bytes(framer.opened(tier_key(1), memoryview(made))) == tier_block(1, n_bytes)


@pytest.mark.parametrize("fleet_key", [None, KEY])
def test_no_bit_of_an_entry_can_be_another(fleet_key: bytes | None) -> None:
    framer = Framer(fleet_key)
    made = framer.framed(tier_key(1), b"some KV")
    for bit in range(8 * len(made)):
        altered = bytearray(made)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Unverified):
            framer.opened(tier_key(1), bytes(altered))


@pytest.mark.parametrize("fleet_key", [None, KEY])
def test_a_cut_or_grown_entry_is_none(fleet_key: bytes | None) -> None:
    framer = Framer(fleet_key)
    made = framer.framed(tier_key(1), b"some KV")
    for n_bytes in range(len(made)):
        with pytest.raises(Unverified):
            framer.opened(tier_key(1), made[:n_bytes])
    with pytest.raises(Unverified) as told:
        framer.opened(tier_key(1), made + b"\0")
    assert told.value.reason == entry.LENGTH


def test_an_entry_cannot_stand_for_another() -> None:
    made = Framer().framed(tier_key(1), b"some KV")
    for key in (tier_key(2), tier_key(1, "other"), TierKey(tier_key(1).tenant_tag, "0" * 64)):
        with pytest.raises(Unverified) as told:
            Framer().opened(key, made)
        assert told.value.reason == entry.OTHER


def test_a_fleet_with_a_key_takes_nothing_unsealed_and_the_other_way_round() -> None:
    plain = Framer().framed(tier_key(1), b"some KV" * 10)
    sealed = Framer(KEY).framed(tier_key(1), b"some KV" * 10)
    for framer, made in ((Framer(KEY), plain), (Framer(), sealed)):
        with pytest.raises(Unverified) as told:
            framer.opened(tier_key(1), made)
        assert told.value.reason == entry.SEAL
    with pytest.raises(Unverified) as told:
        Framer(bytes(32)).opened(tier_key(1), sealed)
    assert told.value.reason == entry.SEAL
    assert b"some KV" not in sealed


def test_whoever_can_make_checksums_cannot_make_seals() -> None:
    """A forged entry: everything is right but the key."""
    forged = Framer(bytes(32)).framed(tier_key(1), b"poison")
    with pytest.raises(Unverified) as told:
        Framer(KEY).opened(tier_key(1), forged)
    assert told.value.reason == entry.SEAL


def test_two_seals_of_one_block_differ() -> None:
    """A nonce that came twice under one key would give the block away."""
    made = {Framer(KEY).framed(tier_key(1), b"some KV") for _ in range(50)}
    assert len({one[HEAD_BYTES : HEAD_BYTES + 12] for one in made}) == 50


def test_the_head_is_as_it_is_described() -> None:
    made = Framer().framed(tier_key(1), b"some KV")
    magic, version, flags, head_bytes, n_bytes = struct.unpack_from("<4sBBHQ", made)
    assert (magic, version, flags, head_bytes, n_bytes) == (b"DKVE", 1, 0, 80, 7)
    assert made[16:32].hex() == tier_key(1).tenant_tag
    assert made[32:64].hex() == tier_key(1).block
    assert len(Framer(KEY).framed(tier_key(1), b"")) == HEAD_BYTES + SEAL_BYTES


@pytest.mark.parametrize("n_bytes", [0, 16, 31, 33])
def test_a_fleet_key_has_32_bytes(n_bytes: int) -> None:
    with pytest.raises(ValueError, match="expected 32 bytes"):
        Framer(bytes(n_bytes))


def test_a_fleet_key_is_read_from_a_file_of_its_owner(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n")
    path.chmod(0o600)
    assert read_fleet_key(path) == KEY
    path.chmod(0o644)
    with pytest.raises(ValueError, match="expected mode 0600, got 0644"):
        read_fleet_key(path)
    for text in ("", "zz" * 32, KEY.hex()[2:], "é" * 64):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ValueError, match="expected 64 hexadecimal digits") as told:
            read_fleet_key(path)
        assert KEY.hex()[2:] not in str(told.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_fleet_key(tmp_path / "none")

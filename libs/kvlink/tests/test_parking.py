"""Lots in which KV waits: what was put comes back, or nothing does."""

import errno
import os
from pathlib import Path
from random import Random

import pytest

from diptych_contracts.errors import Permanent, Refused, Unverified
from diptych_contracts.ids import TransferId
from diptych_kvlink.parking import HostStore, Lot, Store
from diptych_kvlink.parking_file import DiskStore

SLOT_BYTES = 5000
A, B, C = (TransferId(name) for name in "abc")
both_stores = pytest.mark.parametrize("kind", ["host", "disk"])


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def a_store(kind: str, folder: Path) -> Store:
    return HostStore() if kind == "host" else DiskStore(folder, SLOT_BYTES)


def a_folder(parent: Path) -> Path:
    folder = parent / "parking"
    folder.mkdir(mode=0o700)
    return folder


def a_lot(kind: str, folder: Path, *, slots: int = 4, clock: Clock | None = None) -> Lot:
    return Lot(
        kind,
        a_store(kind, folder),
        total_bytes=slots * SLOT_BYTES,
        slot_bytes=SLOT_BYTES,
        clock=clock or Clock(),
    )


def some_blocks(*sizes: int) -> list[memoryview]:
    rng = Random(7)
    return [memoryview(rng.randbytes(size)) for size in sizes]


@both_stores
def test_what_was_put_is_taken(kind: str, tmp_path: Path) -> None:
    lot = a_lot(kind, folder := a_folder(tmp_path))
    first, second = some_blocks(SLOT_BYTES, 17), some_blocks(1, SLOT_BYTES)
    lot.reserve(A, 2)
    lot.reserve(A, 2)
    lot.reserve(B, 2)
    assert lot.room.used_bytes == lot.room.total_bytes == 4 * SLOT_BYTES
    lot.put(A, first)
    lot.put(B, second)
    assert (lot.take(B), lot.take(A)) == (second, first)
    lot.free(A)
    lot.free(A)
    assert lot.take(B) == second
    lot.free(B)
    assert lot.room.used_bytes == 0
    lot.check()
    lot.close()
    assert not list(folder.iterdir())


@both_stores
def test_what_does_not_fit_is_refused_and_keeps_nothing(kind: str, tmp_path: Path) -> None:
    lot = a_lot(kind, a_folder(tmp_path))
    lot.reserve(A, 3)
    with pytest.raises(Refused, match="needs 2 slots, 1 of 4 are free"):
        lot.reserve(B, 2)
    lot.reserve(C, 1)
    lot.check()
    lot.close()


def test_a_full_disk_is_refused_and_asked_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    clock = Clock()
    lot = a_lot("disk", a_folder(tmp_path), clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(Refused, match="No space left"):
            lot.reserve(A, 2)
    assert lot.away
    assert lot.room.total_bytes == lot.room.used_bytes == 0
    with pytest.raises(Refused, match="out of order"):
        lot.reserve(A, 2)
    clock.now_s += 1.0
    lot.reserve(A, 2)
    assert not lot.away
    lot.check()
    lot.close()


def test_a_lot_that_fails_again_is_left_alone_for_longer(tmp_path: Path) -> None:
    clock = Clock()
    lot = a_lot("host", tmp_path, clock=clock)
    for expected_s in (1.0, 2.0, 4.0):
        lot.failed()
        clock.now_s += expected_s - 0.01
        assert lot.away
        clock.now_s += 0.01
        assert not lot.away
    lot.worked()
    lot.failed()
    clock.now_s += 1.0
    assert not lot.away


def test_nobody_can_read_or_alter_what_is_on_disk(tmp_path: Path) -> None:
    store = DiskStore(a_folder(tmp_path), SLOT_BYTES)
    block = memoryview(b"what a user wrote " * 200)
    store.allocate(0)
    store.allocate(1)
    store.write(0, block)
    store.write(1, block)
    assert store._fd is not None
    on_disk = os.pread(store._fd, 1 << 20, 0)
    assert b"what a user wrote" not in on_disk
    os.pwrite(store._fd, bytes([on_disk[100] ^ 1]), 100)
    with pytest.raises(Unverified, match=r"slot 0 .* altered"):
        store.read(0)
    assert store.read(1) == block
    os.pwrite(store._fd, on_disk[: store._stride_bytes], store._stride_bytes)
    with pytest.raises(Unverified):
        store.read(1)
    os.ftruncate(store._fd, 10)
    with pytest.raises(Unverified):
        store.read(1)
    store.close()


def test_the_disk_has_its_room_back_when_nobody_parks(tmp_path: Path) -> None:
    lot = a_lot("disk", a_folder(tmp_path))
    store = lot._store
    assert isinstance(store, DiskStore)
    assert store._fd is not None
    lot.reserve(A, 2)
    assert os.fstat(store._fd).st_blocks * 512 >= 2 * SLOT_BYTES
    assert os.fstat(store._fd).st_mode & 0o777 == 0o600
    lot.free(A)
    assert lot.is_empty
    lot.trim()
    assert os.fstat(store._fd).st_size == 0
    lot.reserve(B, 2)
    assert os.fstat(store._fd).st_blocks * 512 >= 2 * SLOT_BYTES
    lot.close()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(Permanent, match="mode 0700"):
        DiskStore(folder, SLOT_BYTES)


def test_without_nameless_files_a_named_one_is_gone_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    store = DiskStore(folder := a_folder(tmp_path), SLOT_BYTES)
    assert not list(folder.iterdir())
    store.allocate(3)
    store.write(3, memoryview(b"kept"))
    assert store.read(3) == b"kept"
    store.close()

"""The file behind parking on disk. It has no name, so nothing is left of it, however we end.

Each block is sealed (AES-256-GCM) with a key that never leaves this process: on disk nobody can
read it, what was altered there is not read back, and what a dead process has left in the file
system's free blocks is noise. Seals, lengths and key are in memory.

A slot's blocks of disk are allocated when it is promised: a full disk is refused then, and not met
in the middle of a copy. When no slot holds anything the file is cut to nothing.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from diptych_contracts.errors import Permanent, Unverified
from diptych_kvlink.block_seal import BAD_SEAL, new_key
from diptych_kvlink.lockfile import PREFIX, private_folder, sweep_leftovers

_PAGE_BYTES = 4096
_NONCE_BYTES, _TAG_BYTES = 12, 16


@dataclass(frozen=True, slots=True)
class _Kept:
    nonce: bytes
    n_bytes: int
    """In the file, its tag included."""


class DiskStore:
    """Blocks of at most `slot_bytes` in a nameless file in `directory`.

    Raises:
        Permanent: `directory` is not this user's alone, or cannot hold a file.
    """

    def __init__(self, directory: Path, slot_bytes: int) -> None:
        private_folder(directory)
        sweep_leftovers(directory)
        self._stride_bytes = -(-(slot_bytes + _TAG_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        self._seal = AESGCM(new_key())
        self._kept: dict[int, _Kept] = {}
        self._allocated: set[int] = set()
        try:
            self._fd: int | None = _nameless(directory)
        except OSError as err:
            raise Permanent(f"cannot park KV in {directory}: {err.strerror}") from err

    def allocate(self, slot: int) -> None:
        """Have the file system keep the slot's room. May block. Raises `OSError` (`ENOSPC`)."""
        if slot in self._allocated:
            return
        fd, start = self._open_fd(), slot * self._stride_bytes
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, start, self._stride_bytes)
        self._allocated.add(slot)

    def write(self, slot: int, block: memoryview) -> None:
        """Seal and write `block`. Raises `OSError`."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = memoryview(self._seal.encrypt(nonce, block, _bound_to(slot)))
        written = 0
        while written < len(sealed):
            at = slot * self._stride_bytes + written
            written += os.pwrite(self._open_fd(), sealed[written:], at)
        self._kept[slot] = _Kept(nonce, len(sealed))

    def read(self, slot: int) -> memoryview:
        """Read and open what was written. Raises `OSError`, `Unverified`."""
        kept = self._kept[slot]
        sealed = bytearray(kept.n_bytes)
        got = 0
        while got < len(sealed):
            at = slot * self._stride_bytes + got
            n_read = os.preadv(self._open_fd(), [memoryview(sealed)[got:]], at)
            if not n_read:
                break
            got += n_read
        try:
            return memoryview(self._seal.decrypt(kept.nonce, sealed, _bound_to(slot)))
        except InvalidTag as err:
            text = f"slot {slot} of the parking file was altered on disk"
            raise Unverified(text, reason=BAD_SEAL) from err

    def is_allocated(self, slot: int) -> bool:
        """Whether the file system keeps the slot's room already."""
        return slot in self._allocated

    def drop(self, slots: Sequence[int], *, last: bool) -> None:
        """Forget what they hold; after the `last`, `trim` gives the disk its room back."""
        for slot in slots:
            self._kept.pop(slot, None)
        if last:
            self._allocated.clear()

    def trim(self) -> None:
        """Cut the file to nothing. May block. Raises `OSError`."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Close the file, and so delete it. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise OSError(None, "the parking file is closed")
        return self._fd


def _nameless(directory: Path) -> int:
    """An open file (0600) in `directory` that no path leads to."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:  # not every file system can
            pass
    fd, path = mkstemp(dir=directory, prefix=f"{PREFIX}parking-")
    Path(path).unlink(missing_ok=True)
    return fd


def _bound_to(slot: int) -> bytes:
    return b"diptych parked block 1\0" + str(slot).encode()

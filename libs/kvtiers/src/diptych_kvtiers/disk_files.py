"""The files of a disk tier, and what is done with them; may block.

    ROOT/v1/<tenant tag>/<first two digits>/<block>    an entry
    ROOT/new/<random>                                  one being written
    ROOT/gone/<random>                                 a tenant's folder, being removed

An entry appears by a rename, whole; a power cut may still leave it empty or torn, which its
checksum tells, so nothing waits for the disk. Processes that share the directory need no lock:
entries never change, and whoever holds one open keeps it when it is removed.

Entries are read, not mapped: see `docs/decisions/0019`.
"""

import contextlib
import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych_contracts.errors import TierAway, TierFull
from diptych_contracts.tiers import BLOCK_CHARS, TENANT_TAG_CHARS, TierKey, is_hex
from diptych_kvtiers.port import Entry

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_OURS = {errno.EACCES, errno.EIO, errno.ELOOP}
"""One file is another user's, on a bad sector, or a link: the others may be as they were."""
MAX_ENTRY_BYTES = 256 * 1024**2
"""No block is larger: what is, is not read into memory to see what it is."""
_USED_EVERY_S = 60.0
"""A file's time of last use is this coarse."""
_PAGE_BYTES = 4096
_ATTEMPTS = 100
LEFTOVER_S = 300.0
"""A file still under its temporary name after this is nobody's: a write takes no second."""


@dataclass(frozen=True, slots=True)
class Filed:
    """An entry as the directory shows it."""

    key: TierKey
    n_bytes: int
    used_s: float
    """Wall time of its last use."""


def on_disk(n_bytes: int) -> int:
    """What a file of `n_bytes` takes."""
    return -(-n_bytes // _PAGE_BYTES) * _PAGE_BYTES


class DiskFiles:
    """One directory. Any thread may call."""

    def __init__(self, root: Path, *, leftover_s: float = LEFTOVER_S) -> None:
        self._entries, self._new, self._gone = root / "v1", root / "new", root / "gone"
        self._leftover_s = leftover_s

    def prepare(self) -> None:
        """Make the folders; only their owner gets in. Raises `TierAway`."""
        with _told("make folders"):
            for folder in (self._entries, self._new, self._gone):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)

    def path(self, key: TierKey) -> Path:
        """Where an entry is."""
        return self._entries / key.tenant_tag / key.block[:2] / key.block

    def size(self, key: TierKey) -> int | None:
        """Bytes of an entry. Raises `TierAway`."""
        with _told("look"):
            try:
                shown = self.path(key).stat(follow_symlinks=False)
            except FileNotFoundError:
                return None
            return shown.st_size if _is_entry(shown) else None

    def read(self, key: TierKey) -> bytes | None:
        """The whole of an entry, which counts as its use. Raises `TierAway`."""
        with _told("read"):
            try:
                return self._read(self.path(key))
            except FileNotFoundError:
                return None
            except OSError as err:
                if err.errno in _NOT_OURS:
                    with contextlib.suppress(OSError):  # If it is the disk, this fails too.
                        self.path(key).unlink()
                        return None
                raise

    def _read(self, path: Path) -> bytes | None:
        # Without O_NONBLOCK a named pipe keeps its reader for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags)
        try:
            shown = os.fstat(fd)
            if not _is_entry(shown):
                return None
            with open(fd, "rb", buffering=0, closefd=False) as file:
                data = file.read(shown.st_size)
            self._used(fd, shown)
            return data
        finally:
            os.close(fd)

    def _used(self, fd: int, shown: os.stat_result) -> None:
        if abs(time.time() - shown.st_mtime) > _USED_EVERY_S:  # Clocks go back, too.
            with contextlib.suppress(OSError):
                os.utime(fd)

    def write(self, key: TierKey, data: Entry) -> None:
        """Store an entry whole, or not at all. Raises `TierFull`, `TierAway`."""
        new = self._new / uuid.uuid4().hex
        with _told("write"):
            try:
                _write(new, data)
                self._name(new, self.path(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    new.unlink()
                raise

    def _name(self, new: Path, path: Path) -> None:
        try:
            new.rename(path)
        except FileNotFoundError:
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            new.rename(path)
        except IsADirectoryError:
            shutil.rmtree(path)
            new.rename(path)

    def remove(self, keys: Sequence[TierKey]) -> None:
        """Remove entries that are there. Raises `TierAway`."""
        with _told("remove"):
            for key in keys:
                self.path(key).unlink(missing_ok=True)

    def forget(self, tenant_tag: str) -> int:
        """Remove a tenant's folder; gives how many entries were in it.

        Raises:
            TierAway: something of it, or of one that was to be removed before, is still there.
        """
        with _told("remove"):
            gone = self._gone / uuid.uuid4().hex
            with contextlib.suppress(FileNotFoundError):
                (self._entries / tenant_tag).rename(gone)
            entries = sum(len(files) for _, _, files in os.walk(gone))
            for folder in _listed(self._gone):
                if folder.is_dir(follow_symlinks=False):
                    _remove_folder(folder.path)
            return entries

    def sweep(self) -> None:
        """Remove what crashed processes have left. Raises `TierAway`."""
        now_s = time.time()
        with _told("sweep"):
            for file in _listed(self._new):
                with contextlib.suppress(FileNotFoundError):
                    made_s = file.stat(follow_symlinks=False).st_mtime
                    if abs(now_s - made_s) >= self._leftover_s:  # Or of a clock that was ahead.
                        os.unlink(file.path)
            for folder in _listed(self._gone):
                shutil.rmtree(folder.path, ignore_errors=True)

    def scan(self) -> list[Filed]:
        """All entries, the least recently used first. Raises `TierAway`."""
        with _told("scan"):
            return sorted(self._filed(), key=lambda filed: filed.used_s)

    def _filed(self) -> Iterator[Filed]:
        for tenant in _listed(self._entries):
            if not is_hex(tenant.name, TENANT_TAG_CHARS):
                continue
            for part in _listed(tenant.path):
                for file in _listed(part.path):
                    if not is_hex(file.name, BLOCK_CHARS):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        shown = file.stat(follow_symlinks=False)
                        if not _is_entry(shown):
                            continue
                        key = TierKey(tenant.name, file.name)
                        yield Filed(key, shown.st_size, shown.st_mtime)


def _is_entry(shown: os.stat_result) -> bool:
    return stat.S_ISREG(shown.st_mode) and shown.st_size <= MAX_ENTRY_BYTES


def _remove_folder(path: str) -> None:
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):  # Another worker's sweep removes the same.
            shutil.rmtree(path)
        if not os.path.lexists(path):
            return
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _write(path: Path, data: Entry) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=0) as file:
        left = memoryview(data).cast("B")
        while left:
            left = left[file.write(left) :]


def _listed(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _told(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        kind = TierFull if err.errno in _FULL else TierAway
        raise kind(f"cannot {doing}: {err.strerror or err}") from err

"""The file behind a shared-memory pool: its shape, making it, and mapping someone else's.

    offset 0     magic, number of slots, bytes per slot
    offset 64    the gates, one 64-bit generation per slot: the only one a writer may write under
    then         the marks, likewise: the generation a writer has the slot open under
    then         the slots, each starting on a page

0 is no generation. Only the reader writes gates, only a writer writes marks. A writer marks a slot
*before* it looks at the gate, and the reader closes the gate before it looks at the mark (a while
later): so either the writer sees the closed gate, or the reader sees the mark.

A plain file and mmap rather than `multiprocessing.shared_memory`, whose resource tracker deletes
the segment when the *attaching* process ends.
"""

import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from diptych_contracts.errors import Incompatible, Permanent
from diptych_contracts.transfers import LinkEndpoint
from diptych_kvlink.huge_pages import prepare, private, shared
from diptych_kvlink.lockfile import PREFIX, host_id

MAGIC = b"DPTYKV01"
_HEAD = struct.Struct("<8sQQ")
_GATES_AT = 64
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How many slots of how many bytes."""

    slots: int
    slot_bytes: int

    @property
    def stride_bytes(self) -> int:
        """From one slot's start to the next."""
        return _whole_pages(self.slot_bytes)

    @property
    def slots_at(self) -> int:
        """Where the first slot starts."""
        return _whole_pages(_GATES_AT + 2 * _WORD_BYTES * self.slots)

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self.slots_at + self.slots * self.stride_bytes


class PoolMap:
    """A mapped pool: its gates, its marks and its slots."""

    def __init__(self, fd: int, shape: PoolShape) -> None:
        self._map = shared(fd, shape.total_bytes)
        self._bytes = memoryview(self._map)
        marks_at = _GATES_AT + _WORD_BYTES * shape.slots
        self.gates = self._bytes[_GATES_AT:marks_at].cast("Q")
        self.marks = self._bytes[marks_at : marks_at + _WORD_BYTES * shape.slots].cast("Q")
        self.shape = shape

    def slot(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot."""
        start = self.shape.slots_at + slot * self.shape.stride_bytes
        return self._bytes[start : start + n_bytes]

    def slots(self) -> list[memoryview]:
        """Every slot, whole."""
        return [self.slot(slot, self.shape.slot_bytes) for slot in range(self.shape.slots)]

    def close(self) -> None:
        """Unmap; if views are in use, that happens when the last one is dropped."""
        self.gates.release()
        self.marks.release()
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            del self._map


def make_pool(fd: int, path: Path, shape: PoolShape) -> PoolMap:
    """Give the new file `fd` its size and head, and map it.

    Raises:
        Permanent: there is not enough shared memory. (Without this a write would die of SIGBUS.)
    """
    try:
        prepare(fd, shape.total_bytes)
        os.pwrite(fd, _HEAD.pack(MAGIC, shape.slots, shape.slot_bytes), 0)
        return PoolMap(fd, shape)
    except OSError as err:
        raise Permanent(
            f"cannot get {shape.total_bytes / 1e6:.0f} MB for {shape.slots} transfer slots in "
            f"{path.parent}: {err.strerror}; lower the number of slots or enlarge it"
        ) from err


def private_slots(shape: PoolShape) -> list[memoryview]:
    """Slots that no other process sees. Their memory lives as long as any of them."""
    n_bytes = shape.slots * shape.stride_bytes
    whole = memoryview(private(n_bytes))
    starts = range(0, n_bytes, shape.stride_bytes)
    return [whole[start : start + shape.slot_bytes] for start in starts]


def map_pool(endpoint: LinkEndpoint, directory: Path) -> PoolMap:
    """Map the pool of another process.

    Raises:
        Incompatible: it is not on this host, not there, or not what `endpoint` says.
    """
    here = host_id(directory)
    if endpoint.host != here:
        raise Incompatible(f"shm reaches one host only: this is {here}, not {endpoint.host}")
    path = Path(endpoint.address)
    if path.parent != directory or not path.name.startswith(PREFIX):
        raise Incompatible(f"expected a pool in {directory} named {PREFIX}…, got {path!s:.200}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as err:  # the latter for a path that cannot be one
        why = getattr(err, "strerror", None) or str(err)
        raise Incompatible(f"cannot open the pool {path!s:.200}: {why}") from err
    try:
        if endpoint.slots < 1 or endpoint.slot_bytes < 1:
            raise Incompatible(
                f"expected a pool of slots, got {endpoint.slots} of {endpoint.slot_bytes} bytes"
            )
        shape = PoolShape(slots=endpoint.slots, slot_bytes=endpoint.slot_bytes)
        _check_file(fd, path, shape)
        return PoolMap(fd, shape)
    finally:
        os.close(fd)


def _check_file(fd: int, path: Path, shape: PoolShape) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise Incompatible(f"{path} is not a file")
    if found.st_uid != os.geteuid():
        raise Incompatible(f"{path} belongs to uid {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & 0o077:
        raise Incompatible(f"{path} is open to other users: {stat.filemode(found.st_mode)}")
    if found.st_size != shape.total_bytes:
        raise Incompatible(f"{path}: expected {shape.total_bytes} bytes, got {found.st_size}")
    head = os.pread(fd, _HEAD.size, 0)
    if head != _HEAD.pack(MAGIC, shape.slots, shape.slot_bytes):
        raise Incompatible(
            f"{path} is not a pool of {shape.slots} slots of {shape.slot_bytes} bytes"
        )


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

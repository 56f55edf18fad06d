"""Memory for blocks, all of it there at once, on huge pages where the system has some.

A page of 4 KiB is looked up, and by a kernel that copies for another process pinned, for itself: on
pages of 2 MiB NIXL's copy from process to process takes half the time (8 MiB: 0.45 ms for 0.8).
And page faults would cost the first transfers ten times their copy: they are all taken here.

Nothing here is needed: where the system gives no huge page, small ones are used.

Python's own `mmap` keeps its lock while the kernel clears pages: for the 236 MB of 160 slots 0.7 s
on a quiet machine, 44 to 63 s at a load of 40, in which no thread runs and no beat leaves. So a
worker was taken for dead at its first hand-off over NIXL. The kernel is asked beside Python, then,
and piece by piece.
"""

import ctypes
import math
import mmap
import os
import sys
import time

_HUGE_BYTES = 1 << 21
_PIECE_BYTES = 1 << 23
"""At a time: while the kernel is at it, no other thread can map memory."""
_LONGEST_S = 2.0
_POPULATE_READ, _POPULATE_WRITE, _COLLAPSE = 22, 23, 25
"""Linux 5.14 and 6.1; `mmap` does not name them yet."""
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_LIBC = ctypes.CDLL(None)


def private(n_bytes: int) -> mmap.mmap:
    """Fresh memory of this process alone: at least `n_bytes`."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if not _has_huge_pages(n_bytes):
        return mmap.mmap(-1, n_bytes, flags=flags | _POPULATE)
    memory = mmap.mmap(-1, _whole(n_bytes), flags=flags)
    _advised(memory, mmap.MADV_HUGEPAGE)
    if not _advised(memory, _POPULATE_WRITE):
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 0
    return memory


def prepare(fd: int, n_bytes: int) -> None:
    """Give the new file `fd` of shared memory its size, on huge pages.

    Raises:
        OSError: there is no room for it. (Without this a write would die of SIGBUS.)
    """
    os.ftruncate(fd, n_bytes)
    if _has_huge_pages(n_bytes):
        for at in range(0, n_bytes, _HUGE_BYTES):  # Nothing at all would not be collapsed.
            os.pwrite(fd, b"\0", at)
        with _aligned(fd, n_bytes) as memory:
            # Small pages are put together, as long as that is quick: 30 ms per 100 MB.
            _advised(memory, _COLLAPSE, longest_s=_LONGEST_S)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, n_bytes)


def shared(fd: int, n_bytes: int) -> mmap.mmap:
    """The file `fd`, mapped."""
    if not _has_huge_pages(n_bytes):
        return mmap.mmap(fd, n_bytes, flags=mmap.MAP_SHARED | _POPULATE)
    memory = _aligned(fd, n_bytes)
    if not _advised(memory, _POPULATE_READ):
        for at in range(0, n_bytes, mmap.PAGESIZE):
            memory[at]
    return memory


def _has_huge_pages(n_bytes: int) -> bool:
    return sys.platform == "linux" and n_bytes >= _HUGE_BYTES


def _whole(n_bytes: int) -> int:
    return -(-n_bytes // _HUGE_BYTES) * _HUGE_BYTES


def _aligned(fd: int, n_bytes: int) -> mmap.mmap:
    """The file mapped where huge pages can be: at a multiple of their size, if there is luck.

    The kernel puts each mapping right beneath the last one: so one of the missing bytes is put in
    between.
    """
    memory = mmap.mmap(fd, n_bytes)
    astray = ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    if not astray:
        return memory
    memory.close()
    with mmap.mmap(-1, astray, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        return mmap.mmap(fd, n_bytes)


def _advised(memory: mmap.mmap, advice: int, *, longest_s: float = math.inf) -> bool:
    """As `memory.madvise(advice)`, while other threads run; whether the kernel did all of it."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end_s = time.monotonic() + longest_s
    for at in range(0, len(memory), _PIECE_BYTES):
        n_bytes = min(_PIECE_BYTES, len(memory) - at)
        address, length = ctypes.c_void_p(start + at), ctypes.c_size_t(n_bytes)
        if _LIBC.madvise(address, length, ctypes.c_int(advice)) or time.monotonic() > end_s:
            return False
    return True

"""Memory for slots: large enough for huge pages, and the same bytes whether there are any."""

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych_kvlink import huge_pages

N_BYTES = (5 << 20) + 12_345


@pytest.mark.parametrize("has", [True, False])
def test_two_that_map_a_file_see_the_same_bytes(
    tmp_path: Path, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has:
        monkeypatch.setattr(huge_pages, "_has_huge_pages", lambda _: False)
    folder = Path("/dev/shm") if has and Path("/dev/shm").is_dir() else tmp_path
    path = folder / f"diptych-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        huge_pages.prepare(fd, N_BYTES)
        assert os.fstat(fd).st_size == N_BYTES
        with huge_pages.shared(fd, N_BYTES) as one, huge_pages.shared(fd, N_BYTES) as two:
            assert len(one) == N_BYTES
            assert one[:] == bytes(N_BYTES)
            one[-5:] = one[:5] = b"hello"
            assert (two[:5], two[-5:], two[5:-5]) == (b"hello", b"hello", bytes(N_BYTES - 10))
    finally:
        os.close(fd)
        path.unlink()


def test_private_memory_is_there_and_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for n_bytes in (1, mmap.PAGESIZE, N_BYTES):
        with huge_pages.private(n_bytes) as memory:
            assert len(memory) >= n_bytes
            assert memory[:n_bytes] == bytes(n_bytes)
    monkeypatch.setattr(huge_pages, "_POPULATE_WRITE", 9999)  # As a kernel that is older.
    with huge_pages.private(N_BYTES) as memory:
        assert memory[:N_BYTES] == bytes(N_BYTES)


def test_an_older_kernel_maps_a_file_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_POPULATE_READ", "_COLLAPSE"):
        monkeypatch.setattr(huge_pages, name, 9999)
    with (tmp_path / "pool").open("w+b") as file:
        huge_pages.prepare(file.fileno(), N_BYTES)
        with huge_pages.shared(file.fileno(), N_BYTES) as memory:
            assert memory[:] == bytes(N_BYTES)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory comes page by page, as used")
def test_other_threads_run_while_memory_is_made(tmp_path: Path) -> None:
    """A worker that made 236 MB with Python's lock in its hand was silent till taken for dead."""
    assert another_thread_runs_during(lambda: huge_pages.private(N_BYTES))
    with (tmp_path / "pool").open("w+b") as file:
        huge_pages.prepare(file.fileno(), N_BYTES)
        assert another_thread_runs_during(lambda: huge_pages.shared(file.fileno(), N_BYTES))


def another_thread_runs_during(make: Callable[[], mmap.mmap]) -> bool:
    """Whether `make` lets go of Python's lock: here nobody is made to, however long he has it."""
    may_run, ran = threading.Lock(), threading.Event()
    may_run.acquire()
    thread = threading.Thread(target=lambda: (may_run.acquire(), ran.set()))
    give_up_s, before_s = time.monotonic() + 60, sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        may_run.release()
        while not ran.is_set() and time.monotonic() < give_up_s:
            make().close()
        return ran.is_set()
    finally:
        sys.setswitchinterval(before_s)
        thread.join()

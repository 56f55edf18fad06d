"""Ports for processes that a test starts, side by side with other tests.

A port is given once: between the moment a test is told of it and the moment its process listens
there, or after that process has died and its clients still knock, no other test of this machine's
user is told of the same one. Who gave which is kept in a file that all of them share.
"""

import fcntl
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import SystemRandom

_PORTS = range(10_000, 32_000)
"""Below Linux's ephemeral ports (`net.ipv4.ip_local_port_range` begins at 32,768)."""
GIVEN_S = 1800
"""How long nobody else is given a port: longer than a test may take."""
_STAMP = struct.Struct("<Q")
_random = SystemRandom()


def free_port(book: Path | None = None) -> int:
    """A port nobody listens on right now, and that nobody was given lately.

    One of those that the kernel gives nobody by itself: what `bind` to port 0 gives would be taken
    by somebody's client before the service listens that it is meant for.

    Args:
        book: Where it is noted which were given; None: the one that all tests share.
    """
    with _opened(book or _shared()) as file:
        for tries in count():
            port = _random.choice(_PORTS)
            fresh = _claim(file, port, round(time.time())) or tries > len(_PORTS)
            if fresh and _unused(port):
                return port
    raise AssertionError("not reached")


def _shared() -> Path:
    return Path(tempfile.gettempdir()) / f"diptych-ports-{os.getuid()}"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The book, while no other process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FileExistsError(f"{path} is in the way: it should be a file")
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _claim(file: int, port: int, now_s: int) -> bool:
    """Whether `port` was not given lately; now it is."""
    place = (port - _PORTS.start) * _STAMP.size
    noted = os.pread(file, _STAMP.size, place)
    given_s = _STAMP.unpack(noted)[0] if len(noted) == _STAMP.size else 0
    if abs(now_s - given_s) < GIVEN_S:
        return False
    os.pwrite(file, _STAMP.pack(now_s), place)
    return True


def _unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

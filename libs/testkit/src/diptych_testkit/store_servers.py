"""Real Redis (or Valkey) and memcached for a test, on free ports, to be killed and frozen."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diptych_testkit.ports import free_port

_HOST = "127.0.0.1"
_STARTED_S = 60.0
_TRIES = 5
REDIS = ("redis-server", "valkey-server")
MEMCACHED = ("memcached",)


def missing_servers() -> list[str]:
    """What `infra/ci/stores.sh` would install."""
    return [names[0] for names in (REDIS, MEMCACHED) if _installed(names) is None]


def _installed(names: Sequence[str]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


@dataclass(slots=True)
class StoreServer:
    """One server process."""

    command: list[str]
    hello: bytes
    """What it answers in whatever state, and with what."""
    answer: bytes
    port: int
    folder: Path
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def start(self) -> None:
        """Start it and wait until it answers."""
        log = (self.folder / "log").open("ab")
        with log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        end_s = time.monotonic() + _STARTED_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.kill()
                raise RuntimeError(f"no server: {(self.folder / 'log').read_text()[-1000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((_HOST, self.port), timeout=1.0) as asking:
                asking.sendall(self.hello)
                return asking.recv(64).startswith(self.answer)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP: connections are taken, and nothing answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running_redis(folder: Path, *arguments: str) -> Iterator[StoreServer]:
    """A Redis that keeps nothing on disk; `arguments` such as `--maxmemory 10mb`."""
    program = _installed(REDIS)
    assert program is not None, "no redis-server: infra/ci/stores.sh"
    options = ["--bind", _HOST, "--save", "", "--appendonly", "no", *arguments]
    yield from _running([program, "--port", "PORT", *options], b"PING\r\n", b"+PONG", folder)


@contextlib.contextmanager
def running_memcached(folder: Path, *arguments: str) -> Iterator[StoreServer]:
    """A memcached; `arguments` such as `-m 16`."""
    program = _installed(MEMCACHED)
    assert program is not None, "no memcached: infra/ci/stores.sh"
    command = [program, "-l", _HOST, "-p", "PORT", "-u", "nobody", *arguments]
    yield from _running(command, b"version\r\n", b"VERSION", folder)


def _running(
    command: list[str], hello: bytes, answer: bytes, folder: Path
) -> Iterator[StoreServer]:
    for left in reversed(range(_TRIES)):
        port = free_port()
        told = [part.replace("PORT", str(port)) for part in command]
        server = StoreServer(told, hello, answer, port, folder)
        try:
            server.start()
            break
        except RuntimeError:  # somebody took the port meanwhile
            if not left:
                raise
    try:
        yield server
    finally:
        server.kill()

"""Which stacks run on this machine: a file in each one's folder, locked for as long as it lives.

The kernel drops the lock however the supervisor ends, so a leftover is never taken for a stack.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from diptych_cli import folders
from diptych_cli.failing import CliError
from diptych_contracts.ids import Incarnation

FILE = "stack.json"
_LOOKERS_S = 0.5
"""Whoever looks at the file holds its lock for a moment."""
_PAUSE_S = 0.02


class StackFile(msgspec.Struct, frozen=True, kw_only=True):
    """What others need to know of a running stack."""

    supervisor: Incarnation
    pid: int
    port: int
    base_url: str
    nats_url: str
    model: str
    identity: str = ""
    """File of the operator's identity."""
    trust: str = ""
    """File of what it believes."""


@contextmanager
def claimed(directory: Path, stack: StackFile) -> Iterator[None]:
    """Own `directory` inside the `with`, and tell of `stack` there.

    Raises:
        CliError: another stack has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(fd, directory)
        os.ftruncate(fd, 0)
        os.write(fd, msgspec.json.encode(stack))
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def find(port: int | None = None, directory: Path | None = None) -> StackFile:
    """The stack that runs: on `port`, in `directory`, or the only one.

    Raises:
        CliError: there is none, or several to choose from.
    """
    if directory is not None or port is not None:
        place = directory or folders.state() / str(port)
        found = read(place)
        if found is None or port not in (None, found.port):
            raise _none(port, directory)
        return found
    stacks = list(everywhere())
    if len(stacks) > 1:
        ports = ", ".join(str(stack.port) for stack in stacks)
        raise CliError(f"{len(stacks)} stacks run here, on ports {ports}: choose one with --port")
    if not stacks:
        raise _none(port, directory)
    return stacks[0]


def everywhere() -> Iterator[StackFile]:
    """Every stack of this user that runs in a folder of its port's."""
    for path in sorted(folders.state().glob(f"*/{FILE}")):
        if (stack := read(path.parent)) is not None:
            yield stack


_seen: dict[str, StackFile] = {}
"""Stacks that were found in folders of the user's own choice, by their bus."""


def at(nats_url: str) -> StackFile | None:
    """The stack of this user whose bus is at `nats_url`."""
    for stack in everywhere():
        _seen[stack.nats_url] = stack
    return _seen.get(nats_url)


def read(directory: Path) -> StackFile | None:
    """The stack that runs in `directory`."""
    stack = _read(directory)
    if stack is not None:
        _seen[stack.nats_url] = stack
    return stack


def _read(directory: Path) -> StackFile | None:
    try:
        fd = os.open(directory / FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _try_lock(fd, fcntl.LOCK_SH):
            return None
        return msgspec.json.decode(os.read(fd, 65536), type=StackFile)
    except msgspec.DecodeError:
        return None  # being written: it has not begun to start
    finally:
        os.close(fd)


def _lock(fd: int, directory: Path) -> None:
    give_up_s = time.monotonic() + _LOOKERS_S
    while not _try_lock(fd, fcntl.LOCK_EX):
        if time.monotonic() > give_up_s:
            other = read(directory)
            whose = f"the stack on port {other.port} (process {other.pid})" if other else "a stack"
            raise CliError(f"{directory} belongs to {whose}; stop that one or choose another --dir")
        time.sleep(_PAUSE_S)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _none(port: int | None, directory: Path | None) -> CliError:
    if directory is not None:
        return CliError(f"no stack runs in {directory}; start one: diptych up --dir {directory}")
    if port is not None:
        return CliError(
            f"no stack runs on port {port}; start one: diptych up --port {port} "
            "(one that was started with --dir is found with the same --dir)"
        )
    return CliError(
        "no stack runs here; start one: diptych up "
        "(one that was started with --dir is found with the same --dir)"
    )

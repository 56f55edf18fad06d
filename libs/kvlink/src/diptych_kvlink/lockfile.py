"""Files that show whether the process that made them still runs, in a folder of this user's own.

Each is locked (flock) by its owner for as long as it lives; the kernel drops the lock at death,
however it comes. So an unlocked file is a leftover, and a locked one belongs to a process that is
alive, if only frozen. Nothing is ever deleted while locked.
"""

import fcntl
import os
import stat
from pathlib import Path

from diptych_contracts.errors import Permanent

PREFIX = "diptych-"
SHM_DIRECTORY = Path("/dev/shm") / f"{PREFIX}{os.geteuid()}"
"""Memory that processes of one host and one user share by path."""
_ATTEMPTS = 20


def private_folder(directory: Path) -> None:
    """Make `directory`, or make sure that it is this user's and nobody else looks into it.

    Raises:
        Permanent: it is not, and whoever owns it could take our files away.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as err:
        raise Permanent(f"cannot create {directory}: {err.strerror}") from err
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or found.st_mode & 0o077:
        raise Permanent(
            f"{directory} must be a folder of uid {os.geteuid()} with mode 0700; it belongs to uid "
            f"{found.st_uid} and has mode {stat.filemode(found.st_mode)}: chmod 700 it if it is "
            "yours, else name another"
        )


def create_locked(path: Path) -> int:
    """Create `path` (0600, must not exist) and lock it; gives the file descriptor.

    Raises:
        Permanent: the file cannot be made; the message says why.
    """
    for _ in range(_ATTEMPTS):
        fd = _create(path)
        # Between creation and lock the file looks like a leftover: a sweeper may take it.
        if _try_lock(fd) and _is_at(fd, path):
            return fd
        os.close(fd)
        path.unlink(missing_ok=True)
    raise Permanent(f"cannot lock {path}: something keeps taking it")


def is_abandoned(fd: int) -> bool:
    """Whether nobody holds the lock of the open file `fd`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def sweep_leftovers(directory: Path = SHM_DIRECTORY) -> list[str]:
    """Delete our user's files whose owner is dead; gives their names.

    Workers call it at their start; a supervisor may call it after its children have ended.
    """
    return [path.name for path in sorted(directory.glob(f"{PREFIX}*")) if _sweep(path)]


def host_id(directory: Path = SHM_DIRECTORY) -> str:
    """An id of this machine, since its last start, and of the file system that holds `directory`.

    Memory is shared no further: two containers of one machine have one boot id, and usually two
    `/dev/shm`.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = os.uname().nodename
    folder = directory if directory.is_dir() else directory.parent
    return f"{boot}.{folder.stat().st_dev}" if folder.is_dir() else boot


def _create(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise Permanent(f"cannot create {path}: {err.strerror}") from err


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _sweep(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not (ours and _try_lock(fd) and _is_at(fd, path)):
            return False
        path.unlink()
        return True
    finally:
        os.close(fd)

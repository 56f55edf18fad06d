"""Proof of a writer's death, for processes that share a host.

Silence proves nothing: a frozen writer is silent, and writes on when it thaws. So each writer holds
a lock file (`lockfile`) from before its first reservation until after its last write, and a reader
looks whether the lock is gone.
"""

import os
import stat
from collections import OrderedDict
from pathlib import Path

from diptych_contracts.ids import Incarnation
from diptych_kvlink.lockfile import (
    PREFIX,
    SHM_DIRECTORY,
    create_locked,
    is_abandoned,
    private_folder,
)

_REMEMBERED = 1024


def presence_path(writer: Incarnation, directory: Path) -> Path:
    """Where `writer` announces itself."""
    return directory / f"{PREFIX}writer-{writer}"


class Presence:
    """A writer's announcement that it may write into shared memory. Close it last."""

    def __init__(self, writer: Incarnation, directory: Path = SHM_DIRECTORY) -> None:
        private_folder(directory)
        self._path = presence_path(writer, directory)
        self._fd: int | None = create_locked(self._path)

    def close(self) -> None:
        """Withdraw: from here on this process writes nothing. Idempotent."""
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


class Witness:
    """A reader's view of which writers are dead."""

    def __init__(self, directory: Path = SHM_DIRECTORY) -> None:
        self._directory = directory
        self._watched: dict[Incarnation, int] = {}
        self._dead: OrderedDict[Incarnation, None] = OrderedDict()

    def expect(self, writer: Incarnation) -> None:
        """Open `writer`'s lock file, so that its death can be told even once the file is gone."""
        if writer in self._watched or writer in self._dead:
            return
        for known in tuple(self._watched):
            self.is_dead(known)
        try:
            path = presence_path(writer, self._directory)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(path, flags)
        except OSError:
            return  # Never announced here: its death cannot be proved.
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            self._watched[writer] = fd
        else:  # Somebody else's: its lock says nothing of the writer.
            os.close(fd)

    def knows(self, writer: Incarnation) -> bool:
        """Whether `writer` was seen on this host, so that its end can be proved."""
        return writer in self._watched or writer in self._dead

    def is_dead(self, writer: Incarnation) -> bool:
        """Whether `writer` was seen alive here and runs no more."""
        self.expect(writer)
        fd = self._watched.get(writer)
        if fd is not None and is_abandoned(fd):
            os.close(self._watched.pop(writer))
            self._dead[writer] = None
            if len(self._dead) > _REMEMBERED:
                self._dead.popitem(last=False)
        return writer in self._dead

    def close(self) -> None:
        """Forget everybody."""
        while self._watched:
            os.close(self._watched.popitem()[1])

"""Files that only their owner reads, replaced whole: a reader sees the old one or the new one."""

import os
from pathlib import Path

PRIVATE, PUBLIC = 0o600, 0o644
FOLDER = 0o700


def folder(path: Path) -> Path:
    """`path`, made if need be, for its owner only."""
    path.mkdir(mode=FOLDER, parents=True, exist_ok=True)
    path.chmod(FOLDER)
    return path


def write(path: Path, text: str, *, mode: int = PRIVATE) -> None:
    """Put `text` in the place of what is at `path`."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise

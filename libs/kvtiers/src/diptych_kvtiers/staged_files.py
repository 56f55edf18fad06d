"""What writers that were killed have left in a directory used as an object store; may block.

`obstore` writes `<name>#<number>` and renames it, and neither lists nor deletes a file of such a
name: nobody would count it, and forgetting its tenant would leave it.
"""

import contextlib
import os
import re
import time
from pathlib import Path

_STAGED = re.compile(r".+#[0-9]+")
LEFTOVER_S = 300.0
"""One that is older is nobody's: a write takes no second."""


def remove_staged(folder: Path, *, older_s: float = LEFTOVER_S) -> None:
    """Delete what was begun that long ago in `folder` and its folders. Raises `OSError`."""
    inner = [Path(e.path) for e in _entries(folder) if e.is_dir(follow_symlinks=False)]
    for path in (folder, *inner):
        for entry in _entries(path):
            if not _STAGED.fullmatch(entry.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                if abs(time.time() - entry.stat(follow_symlinks=False).st_mtime) >= older_s:
                    os.unlink(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []

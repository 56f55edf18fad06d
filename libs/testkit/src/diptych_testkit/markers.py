"""Words that only tests write: whoever finds one in a log has found a leak."""

from collections.abc import Iterable, Iterator
from pathlib import Path

MARKER = "xylophonequartz"
MARKERS = (MARKER, "xylophone")


def leaks(folder: Path, *, words: Iterable[str] = MARKERS) -> Iterator[tuple[Path, str]]:
    """The lines of logs (`*.log`) under `folder` that hold one of `words`."""
    wanted = [word.encode() for word in words]
    for path in sorted(folder.rglob("*.log")):
        for line in path.read_bytes().splitlines():
            if any(word in line for word in wanted):
                yield path, line[:500].decode(errors="replace")

"""Pinned packages and the hashes of their artifacts, as files hold them.

A pin file (constraints.txt) has `name==version` lines only. A hash file, made from it by
`make hashes`, adds to each pin the SHA-256 of every wheel of that version, in pip's own format, so
that `pip install --require-hashes -r` reads it.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;\\]+)")
HEAD = "# By `make hashes` from {source}: every wheel of each pinned version. Not edited by hand.\n"


class Pin(NamedTuple):
    """One version of one package; `name` is normalized (PEP 503)."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def normalized(name: str) -> str:
    """`name` as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_in(text: str) -> list[Pin]:
    """The pins of a pin file's or a hash file's text, in its order.

    Raises:
        ValueError: a line is neither a pin, a hash nor a comment.
    """
    pins = []
    for line in text.splitlines():
        bare = line.split("#")[0].strip()
        if not bare or bare.startswith("--hash="):
            continue
        found = _PIN.match(bare)
        if found is None:
            raise ValueError(f"expected name==version, got {line!r}")
        pins.append(Pin(normalized(found[1]), found[2]))
    return pins


def hashes_in(text: str) -> dict[Pin, frozenset[str]]:
    """The SHA-256 digests a hash file's text has for each pin. Raises ValueError as `pins_in`."""
    hashes: dict[Pin, frozenset[str]] = {}
    for entry in re.sub(r"#.*|\\\n", "", text).splitlines():
        if entry.strip():
            (pin,) = pins_in(entry)
            hashes[pin] = frozenset(_HASH.findall(entry))
    return hashes


def hash_file(source: str, hashes: Mapping[Pin, Iterable[str]]) -> str:
    """The text of the hash file that is made from the pin file named `source`."""
    lines = [HEAD.format(source=source)]
    for pin in sorted(hashes):
        entry = [str(pin), *(f"    --hash=sha256:{digest}" for digest in sorted(hashes[pin]))]
        lines.append(" \\\n".join(entry) + "\n")
    return "".join(lines)


def read_pins(path: Path) -> list[Pin]:
    """The pins of a file. Raises ValueError as `pins_in`, naming the file."""
    try:
        return pins_in(path.read_text())
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err

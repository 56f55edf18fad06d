"""Hash files: made from pins and the package index, and held against it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from diptych_testkit.supply.index import Wheel, wheels_of
from diptych_testkit.supply.pins import Pin, hash_file, hashes_in, read_pins

FILES = {
    "constraints.txt": "infra/supply/hashes.txt",
    "tests/clients/python/requirements.txt": "tests/clients/python/hashes.txt",
    "tests/triton/requirements.txt": "tests/triton/hashes.txt",
}
"""Each pin file, and the hash file made from it."""


def write(top: Path) -> Iterator[str]:
    """Make every hash file anew; yields a line about each.

    Raises:
        IndexUnreachable: the package index did not answer.
        ValueError: a pin has no wheel, or indexes differ about one.
    """
    for source, target in FILES.items():
        pins = read_pins(top / source)
        found = wheels_of(pins)
        faults = [*_faults(found)]
        if faults:
            raise ValueError("; ".join(faults))
        digests = {pin: {wheel.sha256 for wheel in wheels} for pin, wheels in found.items()}
        (top / target).write_text(hash_file(source, digests))
        yield f"{target}: {len(pins)} pins, {sum(map(len, digests.values()))} wheels"


def _faults(found: Mapping[Pin, Sequence[Wheel]]) -> Iterator[str]:
    for pin, wheels in found.items():
        if not wheels:
            yield f"{pin} has no wheel"
        known: dict[str, str] = {}
        for wheel in wheels:
            if known.setdefault(wheel.filename, wheel.sha256) != wheel.sha256:
                yield f"{pin}: the indexes have different files named {wheel.filename}"


def unequal(top: Path) -> Iterator[str]:
    """Where hash files do not have exactly the pins of their pin files; asks no index."""
    for source, target in FILES.items():
        pins = set(read_pins(top / source))
        hashed = hashes_in((top / target).read_text())
        for pin in sorted(pins - set(hashed)):
            yield f"{pin} of {source} is not in {target}: make hashes"
        for pin in sorted(set(hashed) - pins):
            yield f"{pin} of {target} is not in {source}: make hashes"
        for pin in sorted(pin for pin, digests in hashed.items() if not digests):
            yield f"{pin} of {target} has no hash"


def withdrawn(found: Mapping[Pin, Sequence[Wheel]]) -> Iterator[str]:
    """Pinned versions that their maintainers withdrew, or that have no wheel any more."""
    for pin, wheels in found.items():
        if not wheels:
            yield f"{pin} is gone from the index"
        for reason in sorted({wheel.yanked for wheel in wheels if wheel.yanked is not None}):
            yield f"{pin} was withdrawn by its maintainers: {reason or 'no reason given'}"


def unpinned(
    hashed: Mapping[Pin, frozenset[str]], found: Mapping[Pin, Sequence[Wheel]]
) -> Iterator[str]:
    """Wheels of the index that `hashed` does not have: they came or changed after `make hashes`.

    An installation that would take one is refused; a maintainer may have added one for a new
    Python in good faith, so this alone is no fault.
    """
    for pin, wheels in found.items():
        for wheel in wheels:
            if wheel.sha256 not in hashed.get(pin, frozenset()):
                yield f"{pin}: {wheel.filename} is not pinned (sha256 {wheel.sha256})"

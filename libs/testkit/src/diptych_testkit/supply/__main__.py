"""Hashes, audit and bills of materials of what Diptych is made of.

    python -m diptych_testkit.supply hashes | audit [--strict] | sbom [FOLDER]

Exit code of `audit`: 1 for a fault; 0 if none was found, also where something could not be looked
at from here (it says so); with `--strict` that is 3.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from diptych_testkit.supply import auditing, hashes, sbom

FAULTS, UNASKED = 1, 3


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say, in the folder it is started in."""
    top = Path()
    match list(arguments):
        case ["hashes"]:
            _say(hashes.write(top))
            return 0
        case ["sbom", *folder]:
            _say(sbom.write(top, Path(*folder or ["build/sbom"])))
            return 0
        case ["audit", *options]:
            findings = auditing.audit(top)
            _say(findings.lines())
            if findings.faults:
                return FAULTS
            return UNASKED if findings.unasked and "--strict" in options else 0
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 2


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

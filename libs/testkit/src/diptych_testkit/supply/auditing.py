"""All that can be said of the pinned packages: hashes, licences, withdrawals, vulnerabilities."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from diptych_testkit.supply import hashes, licences, vulnerabilities
from diptych_testkit.supply.closure import installed
from diptych_testkit.supply.index import IndexUnreachable, wheels_of
from diptych_testkit.supply.pins import Pin, hashes_in, read_pins

ALLOWED = "infra/supply/allowed.toml"
NPM_LOCK = "tests/clients/npm/package-lock.json"


@dataclass
class Findings:
    """What an audit found; `unasked`: what it could not look at, and why."""

    faults: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The findings as a person reads them."""
        yield from (f"note: {line}" for line in self.notes)
        yield from (f"NOT AUDITED: {line}" for line in self.unasked)
        yield from (f"fault: {line}" for line in self.faults)


def audit(top: Path, osv: str = vulnerabilities.OSV) -> Findings:
    """Look at everything that can be looked at from here."""
    findings = Findings()
    findings.faults.extend(hashes.unequal(top))
    _look_at_licences(top, findings)
    _ask_index(top, findings)
    _ask_database(top, findings, osv)
    return findings


def pinned(top: Path) -> list[Pin]:
    """Every pin of every pin file."""
    return sorted({pin for source in hashes.FILES for pin in read_pins(top / source)})


def _look_at_licences(top: Path, findings: Findings) -> None:
    allowed = tomllib.loads((top / ALLOWED).read_text())["licences"]
    pins = read_pins(top / "constraints.txt")
    found = {pin.name: package for pin in pins if (package := installed(pin.name))}
    told = {name: licences.licence_of(package) for name, package in found.items()}
    findings.faults.extend(licences.misfits(told, allowed["allowed"], allowed["excepted"]))
    missing = [pin.name for pin in pins if pin.name not in found]
    findings.notes.append(f"licences: {len(told)} packages looked at")
    if missing:
        findings.notes.append(f"licences: not installed, not looked at: {', '.join(missing)}")


def _ask_index(top: Path, findings: Findings) -> None:
    hashed: dict[Pin, frozenset[str]] = {}
    for target in hashes.FILES.values():
        hashed.update(hashes_in((top / target).read_text()))
    try:
        found = wheels_of(sorted(hashed))
    except IndexUnreachable as err:
        findings.unasked.append(f"withdrawn versions: {err}")
        return
    findings.faults.extend(hashes.withdrawn(found))
    findings.notes.append(f"index: {len(found)} pins looked up")
    findings.notes.extend(hashes.unpinned(hashed, found))


def _ask_database(top: Path, findings: Findings, url: str) -> None:
    accepted = tomllib.loads((top / ALLOWED).read_text()).get("vulnerability", [])
    packages = vulnerabilities.purls(pinned(top), top / NPM_LOCK)
    try:
        found = vulnerabilities.known(packages, url)
    except vulnerabilities.DatabaseUnreachable as err:
        findings.unasked.append(f"vulnerabilities: the database is not reachable ({err})")
        return
    today = datetime.now(UTC).date()
    findings.faults.extend(vulnerabilities.unaccepted(found, accepted, today))
    findings.notes.append(f"vulnerabilities: {len(packages)} packages asked about")

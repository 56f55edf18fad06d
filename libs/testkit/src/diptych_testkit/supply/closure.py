"""What an extra of Diptych brings with it, as installed here."""

import runpy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from diptych_testkit.supply.pins import normalized


@dataclass(frozen=True, slots=True)
class Closure:
    """The packages of an extra: by normalized name, and by name those that each needs."""

    packages: Mapping[str, Distribution]
    needs: Mapping[str, frozenset[str]]
    direct: frozenset[str]


def closure_of(top: Path, extra: str) -> Closure:
    """What `extra` of the pyproject.toml in `top` needs at run time.

    Raises:
        PackageNotFoundError: something of it is not installed.
    """
    project = tomllib.loads((top / "pyproject.toml").read_text())["project"]
    declared = runpy.run_path(str(top / "infra/supply/install.py"))["requirements"]
    wanted = [Requirement(line) for line in declared(project, [extra])]
    packages: dict[str, Distribution] = {}
    needs: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        name, extras = normalized(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        packages[name] = distribution(requirement.name)
        below = [*_needed(packages[name], extras)]
        needs.setdefault(name, set()).update(normalized(found.name) for found in below)
        waiting.extend(below)
    return Closure(
        packages,
        {name: frozenset(found) for name, found in needs.items()},
        frozenset(normalized(requirement.name) for requirement in wanted),
    )


def _needed(package: Distribution, extras: frozenset[str]) -> list[Requirement]:
    environments = [{"extra": extra} for extra in (extras or {""})]
    declared = [Requirement(line) for line in package.requires or []]
    return [
        found
        for found in declared
        if found.marker is None or any(found.marker.evaluate(e) for e in environments)
    ]


def installed(name: str) -> Distribution | None:
    """The package of that name, if it is installed."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None

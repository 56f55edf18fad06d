"""Asks the OSV database about what is pinned.

One request for everything: package URLs go there, nothing else of the project does.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from http.client import HTTPException
from pathlib import Path
from typing import Any

from diptych_testkit.supply.pins import Pin

OSV = "https://api.osv.dev/v1/querybatch"
_ASK_S = 20.0
_MOST = 1000
_MAX_ANSWER_BYTES = 16 << 20


class DatabaseUnreachable(Exception):
    """The database did not answer as such."""


def purls(pins: Sequence[Pin], npm_lock: Path) -> list[str]:
    """Package URLs of Python pins and of the packages in an npm lock file."""
    packages = json.loads(npm_lock.read_text())["packages"]
    locked = {
        (path.rsplit("node_modules/", 1)[1], package["version"])
        for path, package in packages.items()
        if path
    }
    python = [f"pkg:pypi/{name}@{version}" for name, version in sorted(set(pins))]
    return [*python, *(f"pkg:npm/{n.replace('@', '%40')}@{v}" for n, v in sorted(locked))]


def known(packages: Sequence[str], url: str = OSV) -> dict[str, list[str]]:
    """The ids of the vulnerabilities known of each package that has any.

    Raises:
        DatabaseUnreachable: it did not answer, or not with one result for each package.
    """
    found: dict[str, list[str]] = {}
    for start in range(0, len(packages), _MOST):
        part = packages[start : start + _MOST]
        results = _ask({"queries": [{"package": {"purl": purl}} for purl in part]}, url)
        if len(results) != len(part):
            raise DatabaseUnreachable(f"{len(results)} results for {len(part)} packages")
        for purl, result in zip(part, results, strict=True):
            ids = [vulnerability["id"] for vulnerability in result.get("vulns", [])]
            if ids:
                found[purl] = sorted(ids)
    return found


def _ask(query: dict[str, Any], url: str) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        url, json.dumps(query).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
            return list(json.loads(answer.read(_MAX_ANSWER_BYTES))["results"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as err:
        raise DatabaseUnreachable(str(err)) from err


def unaccepted(
    found: Mapping[str, Sequence[str]], accepted: Sequence[Mapping[str, Any]], today: date
) -> Iterator[str]:
    """A line for each vulnerability that is not accepted, with a reason, until a later day."""
    until = {entry["id"]: entry["until"] for entry in accepted if entry["reason"].strip()}
    for purl, ids in found.items():
        for name in ids:
            if name not in until:
                yield f"{purl} has {name}"
            elif until[name] < today:
                yield f"{purl} has {name}, which was accepted until {until[name]} only"

"""The bill of materials of each service: CycloneDX 1.6, from what is installed.

The same packages give the same bytes: there is no time in it, and its serial number is made of its
content.
"""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diptych_testkit.supply.closure import Closure, closure_of
from diptych_testkit.supply.licences import UNKNOWN, licence_of

SERVICES = ("gateway", "scheduler", "prefill-worker", "decode-worker", "power-governor")
_NAMESPACE = uuid.UUID("6f4b2d0e-6a53-4c1c-9b1e-2f5d3c8e7a90")


def write(top: Path, folder: Path) -> Iterator[str]:
    """Write `<service>.cdx.json` of every service into `folder`; yields a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    for service in SERVICES:
        bill = bill_of(service, closure_of(top, service))
        file = folder / f"{service}.cdx.json"
        file.write_text(json.dumps(bill, indent=1) + "\n")
        yield f"{file}: {len(bill['components'])} packages"


def bill_of(service: str, closure: Closure, version: str = "0.1.0") -> dict[str, Any]:
    """The bill of one service."""
    itself = f"diptych-{service}"
    bill: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": itself,
                "name": itself,
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": [_component(closure, name) for name in sorted(closure.packages)],
        "dependencies": [
            {"ref": itself, "dependsOn": sorted(_purl(closure, name) for name in closure.direct)},
            *(
                {
                    "ref": _purl(closure, name),
                    "dependsOn": sorted(_purl(closure, need) for need in closure.needs[name]),
                }
                for name in sorted(closure.packages)
            ),
        ],
    }
    serial = uuid.uuid5(_NAMESPACE, json.dumps(bill, sort_keys=True))
    return {**bill, "serialNumber": f"urn:uuid:{serial}"}


def _component(closure: Closure, name: str) -> dict[str, Any]:
    package = closure.packages[name]
    purl = _purl(closure, name)
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
    }
    licence = licence_of(package)
    if licence != UNKNOWN:
        component["licenses"] = [{"expression": licence}]
    return component


def _purl(closure: Closure, name: str) -> str:
    return f"pkg:pypi/{name}@{closure.packages[name].version}"

"""Under which licence each installed package is, and whether that fits ours (Apache-2.0).

Which licences fit stands in infra/supply/allowed.toml, with exceptions by name and their reason.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution

_NAMES = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License Version 2.0": "Apache-2.0",
    "PSFL": "PSF-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
}
_CLASSIFIERS = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
UNKNOWN = "NOASSERTION"


def licence_of(distribution: Distribution) -> str:
    """The SPDX expression of its licence, by its own metadata; UNKNOWN if they tell none."""
    told = distribution.metadata
    if "License-Expression" in told:
        return str(told["License-Expression"])
    name = str(told["License"]).strip() if "License" in told else ""
    if name and "\n" not in name and len(name) < 60:
        return _NAMES.get(name, name)
    classifiers = told.get_all("Classifier") or []
    last = (c.rsplit(" :: ", 1)[1] for c in classifiers if c.startswith("License :: "))
    known = sorted({_CLASSIFIERS[name] for name in last if name in _CLASSIFIERS})
    return " OR ".join(known) or UNKNOWN


def fits(expression: str, allowed: Iterable[str]) -> bool:
    """Whether one may choose licences of `allowed` under `expression` (no parentheses)."""
    known = set(allowed)
    return any(set(choice.split(" AND ")) <= known for choice in expression.split(" OR "))


def misfits(
    licences: Mapping[str, str],
    allowed: Iterable[str],
    excepted: Mapping[str, Mapping[str, str]],
) -> Iterator[str]:
    """A line for each package whose licence does not fit, and each exception that is not needed.

    Args:
        licences: the expression of each package.
        allowed: what fits.
        excepted: by package: the `licence` it has, and the `reason` why it may.
    """
    for name, licence in licences.items():
        exception = excepted.get(name)
        if fits(licence, allowed):
            if exception is not None:
                yield f"{name} is {licence}: its exception is not needed"
        elif exception is None:
            yield f"{name} is {licence}, which is not among the allowed licences"
        elif exception["licence"] != licence or not exception["reason"].strip():
            yield f"{name} is {licence}; its exception does not say so, or not why"

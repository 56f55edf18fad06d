"""Numbers from a Prometheus page, summed over labels: an engine has one series per rank."""

import math
import re
from collections.abc import Mapping

_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


def totals(page: str, prefix: str) -> dict[str, float]:
    """The sum of each metric whose name begins with `prefix`, without a counter's `_total`.

    Finite numbers only.
    """
    sums: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith(prefix):
            continue
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        value = rest.rpartition("}")[2].split() if "{" in line else rest.split()
        try:
            number = float(value[0])
        except (IndexError, ValueError):
            continue
        if not math.isfinite(number):  # a quotient of nothing: it says nothing
            continue
        name = name.removesuffix("_total")
        sums[name] = sums.get(name, 0.0) + number
    return sums


def labels(page: str, name: str) -> Mapping[str, str]:
    """The labels of the first series of metric `name`; empty: there is none."""
    for line in page.splitlines():
        if line.startswith(name + "{"):
            return dict(_LABEL.findall(line[len(name) :].rpartition("}")[0]))
    return {}

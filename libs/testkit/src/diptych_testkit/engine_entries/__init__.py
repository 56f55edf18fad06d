"""Every engine the behavioural suite (`tests/engines`) runs on: a module each, found by itself.

A module gives `ENTRIES`: names, and how to open a pair of engines that hand over to each other.
"""

import importlib
import pkgutil

from diptych_testkit.engine_pairs import EngineEntry


def entries() -> list[EngineEntry]:
    """All of them, by module."""
    found: list[EngineEntry] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        found += importlib.import_module(f"{__name__}.{module}").ENTRIES
    return found

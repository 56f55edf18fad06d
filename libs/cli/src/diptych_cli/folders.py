"""Where files go: the XDG folders, or what stands in for them."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """For what can be fetched again: model weights."""
    return _xdg(environ, "XDG_CACHE_HOME", Path(".cache"))


def state(environ: Mapping[str, str] = os.environ) -> Path:
    """For what a stack remembers between runs: its JetStream store."""
    return _xdg(environ, "XDG_STATE_HOME", Path(".local") / "state")


def _xdg(environ: Mapping[str, str], variable: str, fallback: Path) -> Path:
    chosen = environ.get(variable, "")
    # The XDG rules: a relative path there is to be ignored.
    root = Path(chosen) if Path(chosen).is_absolute() else Path.home() / fallback
    return root / "diptych"

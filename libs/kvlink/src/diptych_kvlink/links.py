"""Which kinds of link exist, and how to open either side of one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from diptych_contracts.errors import Incompatible
from diptych_contracts.transfers import LinkEndpoint
from diptych_kvlink import shm
from diptych_kvlink.lockfile import SHM_DIRECTORY
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.port import LinkTarget, LinkWriter

_WRITERS: dict[str, Callable[[LinkEndpoint, Path], LinkWriter]] = {shm.KIND: shm.ShmWriter}
_TARGETS: dict[str, Callable[[str, PoolShape, Path], LinkTarget]] = {shm.KIND: shm.ShmPool}

KINDS = tuple(_WRITERS)
"""The kinds this build supports, fastest first."""


def open_link(endpoint: LinkEndpoint, *, directory: Path = SHM_DIRECTORY) -> LinkWriter:
    """The writer's side of `endpoint`.

    Raises:
        Incompatible: of a kind this build does not know, or out of reach from here.
    """
    factory = _WRITERS.get(endpoint.kind)
    if factory is None:
        raise Incompatible(_unknown(endpoint.kind))
    return factory(endpoint, directory)


def open_target(
    kind: str, *, name: str, shape: PoolShape, directory: Path = SHM_DIRECTORY
) -> LinkTarget:
    """A reader's slots of `shape`, reachable over `kind`. Raises `Incompatible`, `Permanent`."""
    factory = _TARGETS.get(kind)
    if factory is None:
        raise Incompatible(_unknown(kind))
    return factory(name, shape, directory)


def choose(offered: Sequence[LinkEndpoint], *, wanted: str | None = None) -> LinkEndpoint:
    """The first offered endpoint of a kind this build supports (`wanted`, if that is named).

    Raises:
        Incompatible: there is none.
    """
    for endpoint in offered:
        if endpoint.kind in KINDS and wanted in (None, endpoint.kind):
            return endpoint
    kinds = ", ".join(endpoint.kind for endpoint in offered) or "none"
    raise Incompatible(
        f"no common KV link: expected {wanted or ' or '.join(KINDS)}, offered {kinds}"
    )


def _unknown(kind: str) -> str:
    return f"unknown kind of KV link {kind!r}: expected {' or '.join(KINDS)}"

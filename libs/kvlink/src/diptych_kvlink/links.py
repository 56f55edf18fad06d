"""Which kinds of link exist, and how to open either side of one."""

from dataclasses import dataclass
from pathlib import Path

from diptych_contracts.errors import Incompatible, Permanent
from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint
from diptych_kvlink import shm, tcp_target
from diptych_kvlink.lockfile import SHM_DIRECTORY, host_id
from diptych_kvlink.pool_file import PoolShape, private_slots
from diptych_kvlink.port import LinkTarget, LinkWriter
from diptych_kvlink.tcp_target import Listening, TcpTarget
from diptych_kvlink.tcp_writer import TcpWriter

SHM, TCP = shm.KIND, tcp_target.KIND
KINDS = (SHM, TCP)
"""The kinds this build supports, fastest first."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Which links a process uses, and where."""

    kinds: tuple[str, ...] = KINDS
    """Fastest first."""
    directory: Path = SHM_DIRECTORY
    """shm: where shared memory lives."""
    host: str = "127.0.0.1"
    """tcp: the address to listen on; a wildcard announces the machine's own."""
    port: int = 0
    """tcp: 0 takes a free one."""
    stall_s: float = 3.0
    """tcp: a peer silent for so long in the middle of something is hung."""


DEFAULT_LINKS = LinkSettings()


def open_link(endpoint: LinkEndpoint, *, writer: Incarnation, settings: LinkSettings) -> LinkWriter:
    """The writer's side of `endpoint`.

    Raises:
        Incompatible: of a kind this build does not know, or out of reach from here.
    """
    match endpoint.kind:
        case shm.KIND:
            return shm.ShmWriter(endpoint, settings.directory)
        case tcp_target.KIND:
            return TcpWriter(endpoint, writer, stall_s=settings.stall_s)
        case kind:
            raise Incompatible(_unknown(kind))


def open_targets(settings: LinkSettings, *, name: str, shape: PoolShape) -> tuple[LinkTarget, ...]:
    """A reader's slots of `shape`, reachable over each kind in `settings`: one memory for all.

    Raises:
        Permanent: no kind, an unknown one, not enough shared memory, or nowhere to listen.
    """
    unknown = [kind for kind in settings.kinds if kind not in KINDS]
    if unknown or not settings.kinds:
        raise Permanent(_unknown(", ".join(unknown)))
    targets: dict[str, LinkTarget] = {}
    slots = None
    if SHM in settings.kinds:
        targets[SHM] = pool = shm.ShmPool(name, shape, settings.directory)
        slots = pool.slots
    try:
        if TCP in settings.kinds:
            targets[TCP] = TcpTarget(
                name,
                private_slots(shape) if slots is None else slots,
                slot_bytes=shape.slot_bytes,
                listening=_listening(settings),
            )
    except BaseException:
        for target in targets.values():
            target.close()
        raise
    return tuple(targets[kind] for kind in dict.fromkeys(settings.kinds))


def _listening(settings: LinkSettings) -> Listening:
    return Listening(settings.host, settings.port, settings.stall_s, host_id(settings.directory))


def _unknown(kind: str) -> str:
    return f"unknown kind of KV link {kind!r}: expected {' or '.join(KINDS)}"

"""Which kinds of link exist, and how to open either side of one."""

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diptych_contracts.codecs import RAW
from diptych_contracts.errors import Incompatible, Permanent
from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint
from diptych_kvlink import nixl_address, shm, tcp_target
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.lockfile import SHM_DIRECTORY, host_id
from diptych_kvlink.nixl_library import ISOLATED, LOOPBACK, why_not_offered
from diptych_kvlink.nixl_target import NixlTarget
from diptych_kvlink.nixl_writer import NixlWriter, NixlWriting
from diptych_kvlink.pool_file import PoolShape, private_slots
from diptych_kvlink.port import LinkTarget, LinkWriter
from diptych_kvlink.presence import Presence, Witness
from diptych_kvlink.tcp_listening import Listening
from diptych_kvlink.tcp_receiving import Guard
from diptych_kvlink.tcp_target import TcpTarget
from diptych_kvlink.tcp_writer import TcpWriter

SHM, NIXL, TCP = shm.KIND, nixl_address.KIND, tcp_target.KIND
KINDS = (SHM, NIXL, TCP)
"""The kinds this build supports, fastest first."""


class Announced(Protocol):
    """A writer's sign of life to readers."""

    def close(self) -> None:
        """From here on it writes nothing."""
        ...


class LinkAdapter(Protocol):
    """Other links than this build's own, of the kinds it is asked for: those of a test, say."""

    def open_targets(
        self, kinds: tuple[str, ...], *, name: str, shape: PoolShape
    ) -> tuple[LinkTarget, ...]:
        """See `open_targets`."""
        ...

    def open_link(self, endpoint: LinkEndpoint, *, writer: Incarnation) -> LinkWriter:
        """See `open_link`."""
        ...

    def thread(self, link: LinkWriter) -> Executor:
        """What runs `link`'s blocking calls, one after another."""
        ...

    def announce(self, writer: Incarnation) -> Announced:
        """Let readers know that `writer` lives."""
        ...


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Which links a process uses, and where."""

    kinds: tuple[str, ...] = (SHM, TCP)
    """Fastest first."""
    directory: Path = SHM_DIRECTORY
    """shm: where shared memory lives."""
    host: str = "127.0.0.1"
    """tcp: the address to listen on; a wildcard announces the machine's own."""
    port: int = 0
    """tcp: 0 takes a free one."""
    tls: bool = True
    """tcp: whether nothing crosses but through mutual TLS 1.3. Off: for isolated networks."""
    nixl_network: str = LOOPBACK
    """nixl: which network it may use (`nixl_library`); nothing there is encrypted."""
    stall_s: float = 3.0
    """tcp, nixl: a peer silent for so long in the middle of something is hung."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds: by it tickets end."""
    codecs: tuple[str, ...] = (RAW,)
    """How blocks may be encoded; others are written and taken as they are."""
    seal: bool = False
    """Whether blocks are sealed with a key of their transfer's own where a link has no TLS."""
    adapter: LinkAdapter | None = None
    """What opens the links, if not this module."""


DEFAULT_LINKS = LinkSettings()


def open_link(
    endpoint: LinkEndpoint,
    *,
    writer: Incarnation,
    settings: LinkSettings,
    identity: LinkIdentity | None = None,
    writing: NixlWriting | None = None,
) -> LinkWriter:
    """The writer's side of `endpoint`; `identity` is what this process shows there.

    `writing` is this process's NIXL agent, where it has one.

    Raises:
        Incompatible: of a kind this build does not know, or out of reach from here, or in the
            clear where TLS is required.
    """
    if settings.adapter is not None:
        return settings.adapter.open_link(endpoint, writer=writer)
    match endpoint.kind:
        case shm.KIND:
            return shm.ShmWriter(endpoint, settings.directory)
        case nixl_address.KIND:
            if writing is None:
                raise Incompatible("this process has no NIXL agent")
            _check_reach(endpoint, settings)
            return NixlWriter(endpoint, writing, stall_s=settings.stall_s)
        case tcp_target.KIND:
            if settings.tls and not endpoint.certificate:
                raise Incompatible("its reader takes KV over tcp without TLS; TLS is required here")
            return TcpWriter(endpoint, writer, stall_s=settings.stall_s, identity=identity)
        case kind:
            raise Incompatible(_unknown(kind))


def link_thread(link: LinkWriter, settings: LinkSettings) -> Executor:
    """A thread for `link` alone, so that a hung peer holds up nobody else's blocks."""
    if settings.adapter is not None:
        return settings.adapter.thread(link)
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-link")


def announce(writer: Incarnation, settings: LinkSettings) -> Announced | None:
    """Let readers know that `writer` lives, where a kind needs that. Raises `Permanent`."""
    if settings.adapter is not None:
        return settings.adapter.announce(writer)
    return Presence(writer, settings.directory) if _must_announce(settings) else None


def offered(settings: LinkSettings) -> tuple[str, ...]:
    """The kinds of `settings` that work here: all but NIXL's where there is none."""
    if settings.adapter is None and not why_not_offered(settings.nixl_network):
        return settings.kinds
    return tuple(kind for kind in settings.kinds if kind != NIXL)


def open_writing(writer: Incarnation, settings: LinkSettings) -> NixlWriting | None:
    """This process's NIXL agent to write with, where there is NIXL. Raises `Permanent`."""
    if NIXL not in offered(settings):
        return None
    return NixlWriting(writer, network=settings.nixl_network)


def open_targets(
    settings: LinkSettings, *, name: str, shape: PoolShape, guard: Guard
) -> tuple[LinkTarget, ...]:
    """A reader's slots of `shape`, reachable over each kind in `settings`: one memory for all.

    Raises:
        Permanent: no kind, an unknown one, not enough shared memory, or nowhere to listen.
    """
    unknown = [kind for kind in settings.kinds if kind not in KINDS]
    if unknown or not settings.kinds:
        raise Permanent(_unknown(", ".join(unknown)))
    if settings.adapter is not None:
        return settings.adapter.open_targets(offered(settings), name=name, shape=shape)
    targets: dict[str, LinkTarget] = {}
    slots = None
    kinds = offered(settings)
    announced = _must_announce(settings)
    if not kinds:
        raise Permanent(f"no KV link: {why_not_offered(settings.nixl_network)}")
    if SHM in kinds:
        targets[SHM] = pool = shm.ShmPool(name, shape, settings.directory)
        slots = pool.slots
    slots = private_slots(shape) if slots is None else slots
    try:
        if NIXL in kinds:
            targets[NIXL] = NixlTarget(
                name,
                slots,
                shape=shape,
                network=settings.nixl_network,
                directory=settings.directory,
            )
        if TCP in kinds:
            targets[TCP] = TcpTarget(
                name,
                slots,
                slot_bytes=shape.slot_bytes,
                listening=_listening(settings),
                guard=guard,
                witness=Witness(settings.directory) if announced else None,
            )
    except BaseException:
        for target in targets.values():
            target.close()
        raise
    return tuple(targets[kind] for kind in dict.fromkeys(kinds))


def _must_announce(settings: LinkSettings) -> bool:
    """Whether a link's reader has to be able to prove that a writer is dead."""
    return SHM in settings.kinds or NIXL in settings.kinds


def _check_reach(endpoint: LinkEndpoint, settings: LinkSettings) -> None:
    """KV leaves this machine by NIXL only where that was said to be safe."""
    here = host_id(settings.directory)
    if endpoint.host and endpoint.host != here:
        raise Incompatible(f"that NIXL agent is reached on {endpoint.host} only; this is {here}")
    if not endpoint.host and settings.nixl_network != ISOLATED:
        raise Incompatible("its reader is reached by NIXL over a network, in the clear")


def _listening(settings: LinkSettings) -> Listening:
    here = host_id(settings.directory)
    return Listening(settings.host, settings.port, settings.stall_s, here, settings.tls)


def _unknown(kind: str) -> str:
    return f"unknown kind of KV link {kind!r}: expected {', '.join(KINDS)}"

"""KV links of one process in virtual time: bytes are copied, checksums computed, nothing is opened.

They pose as the two real kinds, each with its own promises: over `shm` a writer's buffer *is* the
reader's slot, so a writer that is held up may still touch it and the slot needs quarantine; over
`tcp` bytes wait in the writer's own memory, and are copied only while the slot's gate is open.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

from diptych_contracts.errors import Incompatible, LinkBroken, Refused
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink.lockfile import host_id
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.port import CLOSED

SHM = "shm"
GIB_PER_S = 2.0**30


@dataclass(slots=True)
class LinkWeather:
    """How links behave at the moment."""

    latency_s: float = 0.0002
    bytes_per_s: float = GIB_PER_S
    break_frac: float = 0.0
    """How often sending fails."""
    rng: Random = field(default_factory=lambda: Random(0))

    def takes_s(self, n_bytes: int) -> float:
        """How long `n_bytes` are on their way."""
        return self.latency_s + n_bytes / self.bytes_per_s

    def breaks(self) -> bool:
        """Whether the next thing sent fails."""
        return self.break_frac > 0 and self.rng.random() < self.break_frac


class Network:
    """What the workers of one test share: pools by address, and which writers live."""

    def __init__(self) -> None:
        self.weather = LinkWeather()
        self._targets: dict[str, VirtualTarget] = {}
        self._writers: dict[Incarnation, None] = {}

    def open_targets(
        self, kinds: tuple[str, ...], *, name: str, shape: PoolShape
    ) -> "tuple[VirtualTarget, ...]":
        """See `kvlink.links.LinkAdapter`."""
        slots = [bytearray(shape.slot_bytes) for _ in range(shape.slots)]
        targets = tuple(VirtualTarget(self, kind, name, slots) for kind in kinds)
        for target in targets:
            self._targets[target.endpoint.address] = target
        return targets

    def open_link(self, endpoint: LinkEndpoint, *, writer: Incarnation) -> "VirtualWriter":
        """See `kvlink.links.LinkAdapter`."""
        if endpoint.address not in self._targets:
            raise Incompatible(f"there is no pool at {endpoint.address}")
        return VirtualWriter(self, endpoint, writer)

    def thread(self, link: Any) -> "LinkThread":
        """See `kvlink.links.LinkAdapter`."""
        return LinkThread(link.pending_s)

    def announce(self, writer: Incarnation) -> "Announcement":
        """See `kvlink.links.LinkAdapter`."""
        self._writers[writer] = None
        return Announcement(lambda: self._writers.pop(writer, None))

    def target(self, address: str) -> "VirtualTarget | None":
        """The pool at `address`, if its worker lives."""
        return self._targets.get(address)

    def leave(self, address: str) -> None:
        """A pool is gone."""
        self._targets.pop(address, None)

    def lives(self, writer: Incarnation) -> bool:
        """Whether `writer` has announced itself and not withdrawn."""
        return writer in self._writers

    def leaks(self) -> list[str]:
        """Slots that somebody can still write into, or has marked."""
        return [leak for target in self._targets.values() for leak in target.leaks()]


@dataclass(slots=True)
class Announcement:
    """A writer's sign of life."""

    withdraw: Callable[[], Any]

    def close(self) -> None:
        """It writes no more."""
        self.withdraw()


class VirtualTarget:
    """The reader's side; see `kvlink.port.LinkTarget`."""

    def __init__(self, network: Network, kind: str, name: str, slots: list[bytearray]) -> None:
        self._network = network
        self._expected: dict[Incarnation, None] = {}
        self.slots = slots
        self.gates: list[tuple[int, Incarnation | None]] = [(CLOSED, None)] * len(slots)
        self.marks = [CLOSED] * len(slots)
        self.stops_writers = kind != SHM
        self.endpoint = LinkEndpoint(
            kind=kind,
            host=host_id(),
            address=f"{kind}/{name}",
            slots=len(slots),
            slot_bytes=len(slots[0]),
        )

    def admit(
        self,
        slot: int,
        generation: int,
        writer: Incarnation | None = None,
        transfer_id: TransferId | None = None,
    ) -> None:
        self.gates[slot] = (generation, writer)

    def is_open(self, ref: SlotRef, writer: Incarnation) -> bool:
        """Whether `writer` may write the slot."""
        return ref.generation != CLOSED and self.gates[ref.slot] == (ref.generation, writer)

    def view(self, slot: int, n_bytes: int) -> memoryview:
        return memoryview(self.slots[slot])[:n_bytes].toreadonly()

    def is_idle(self, ref: SlotRef) -> bool:
        return self.marks[ref.slot] != ref.generation

    def expect(self, writer: Incarnation, certificate: bytes = b"", agent: bytes = b"") -> None:
        if self._network.lives(writer):
            self._expected[writer] = None

    def is_dead(self, writer: Incarnation) -> bool:
        return writer in self._expected and not self._network.lives(writer)

    def close(self) -> None:
        self._network.leave(self.endpoint.address)

    def leaks(self) -> list[str]:
        where = self.endpoint.address
        opened = [f"{where}: slot {n} is open" for n, gate in enumerate(self.gates) if gate[0]]
        return opened + [
            f"{where}: slot {n} is marked" for n, mark in enumerate(self.marks) if mark
        ]


class VirtualWriter:
    """The writer's side; see `kvlink.port.LinkWriter`."""

    def __init__(self, network: Network, endpoint: LinkEndpoint, writer: Incarnation) -> None:
        self._network = network
        self._endpoint = endpoint
        self._writer = writer
        self._target = network.target(endpoint.address)
        self._connected = endpoint.kind == SHM
        self._unsent: dict[SlotRef, int] = {}

    @property
    def is_ready(self) -> bool:
        return self._connected

    def connect(self) -> None:
        if self._network.target(self._endpoint.address) is None or self._network.weather.breaks():
            raise LinkBroken(f"cannot connect to {self._endpoint.address}")
        self._connected = True

    def pending_s(self) -> float:
        """How long what is ready to be sent will be on its way."""
        return self._network.weather.takes_s(sum(self._unsent.values()))

    def buffer(self, ref: SlotRef) -> memoryview:
        target = self._reached(ref)
        size = self._endpoint.slot_bytes
        self._unsent[ref] = size
        if self._endpoint.kind != SHM:
            return memoryview(bytearray(size))
        target.marks[ref.slot] = ref.generation
        return memoryview(target.slots[ref.slot])

    def send(self, blocks: Sequence[tuple[SlotRef, memoryview]], seal: bytes = b"") -> None:
        if self._network.weather.breaks():
            self._connected = self._endpoint.kind == SHM
            raise LinkBroken(f"the link to {self._endpoint.address} broke")
        for ref, data in blocks:
            target = self._reached(ref)
            if self._endpoint.kind != SHM:
                target.slots[ref.slot][: len(data)] = data
            self._unsent.pop(ref, None)

    def confirm(self) -> None:
        pass

    def is_sending(self, ref: SlotRef) -> bool:
        return False

    def stop(self, ref: SlotRef) -> None:
        self._unsent.pop(ref, None)
        if self._target is not None and self._target.marks[ref.slot] == ref.generation:
            self._target.marks[ref.slot] = CLOSED

    def reader_is_gone(self) -> bool:
        return self._network.target(self._endpoint.address) is None

    def close(self) -> None:
        self._connected = False

    def _reached(self, ref: SlotRef) -> VirtualTarget:
        if self._target is None or (self._endpoint.kind != SHM and self.reader_is_gone()):
            raise LinkBroken(f"{self._endpoint.address} is gone")
        if not self._target.is_open(ref, self._writer):
            raise Refused(RefusalReason.UNKNOWN_TICKET, f"slot {ref.slot} is closed for {ref}")
        return self._target


class LinkThread(Executor):
    """Runs a link's calls in the loop, each once its bytes had time to arrive, in order."""

    def __init__(self, takes_s: Callable[[], float]) -> None:
        self._takes_s = takes_s
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[asyncio.TimerHandle, Callable[[], None]]] = []
        self._free_s = 0.0
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("the link's thread has ended")
        done: Future[Any] = Future()

        def call() -> None:
            self._waiting = [entry for entry in self._waiting if entry[1] is not call]
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(fn(*args, **options))
            except Exception as err:
                done.set_exception(err)

        self._free_s = max(self._free_s, self._loop.time()) + self._takes_s()
        self._waiting.append((self._loop.call_at(self._free_s, call), call))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End; who waits for it has what was submitted done at once."""
        self._closed = True
        for timer, call in tuple(self._waiting) if wait else ():
            timer.cancel()
            call()

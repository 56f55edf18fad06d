"""The `nixl` link, writer's side: NIXL writes from registered memory into the reader's slots.

What a writer that asks is told: before it writes it reads the slots' gates, and it obeys what the
reader asks (`nixl_notes`). NIXL itself stops nobody. So a write is over when NIXL says so and not
when its sender gives up: till then its source, the link and its reader's slot are taken.
"""

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from diptych_contracts.errors import DiptychError, Incompatible, LinkBroken, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink.nixl_address import NixlAddress
from diptych_kvlink.nixl_notes import Ask, Stopped, unpack
from diptych_kvlink.nixl_plane import PeerGone, Plane, Post, Program
from diptych_kvlink.nixl_sources import Source, Sources, lasting

_RETRY_S = 0.25
_LEAST_BYTES_PER_S = 16_000_000
"""NIXL tells of no progress: a batch of 16 MB to a hung reader is given up 1 s after `stall_s`."""
_WORD_BYTES = 8
_CONNECT_S = 5.0
_REMEMBERED = 256
_GREET_EVERY_S = 0.2
_GREETING = b"DKV."
"""A note that says nothing: only who sends something is told that the peer is gone."""


class NixlWriting:
    """What all `nixl` writers of a process share: the agent, its sources, and what it was asked."""

    def __init__(self, writer: Incarnation, *, network: str) -> None:
        self.plane = Plane(writer, network=network, heard=self._hear)
        self.agent = f"{self.plane.name}/".encode() + self.plane.metadata()
        """For its `Reserve`s: by it a reader can ask, and tell whether this process lives.

        Made before anything is registered: so it opens no memory to anybody.
        """
        self.sources = Sources(self.plane)
        self.on_their_way: set[Batch] = set()
        self._closed_up_to: OrderedDict[str, dict[int, int]] = OrderedDict()

    def closed_up_to(self, agent: str) -> Mapping[int, int]:
        """The slots that the reader has asked back, each up to which generation."""
        return self._closed_up_to.get(agent, {})

    def close(self) -> None:
        """End the agent. Idempotent."""
        self.plane.close()

    def _hear(self, name: str, data: bytes) -> None:
        ask = unpack(data)
        if not isinstance(ask, Ask):
            return
        address = NixlAddress.parse(ask.address)
        if address.agent != name:
            return
        closed = self._closed_up_to.setdefault(name, {})
        self._closed_up_to.move_to_end(name)
        for ref in ask.refs:
            closed[ref.slot] = max(ref.generation, closed.get(ref.slot, 0))
        if len(self._closed_up_to) > _REMEMBERED:
            self._closed_up_to.popitem(last=False)
        moving = {
            given.ref for batch in self.on_their_way if batch.agent == name for given in batch.given
        }
        stopped = tuple(ref for ref in ask.refs if ref not in moving)
        if stopped:
            self.plane.load(name, address.metadata)
            self.plane.note(name, Stopped(ask.nonce, stopped).pack())


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks that cross in one write."""

    agent: str
    given: "list[Given]"
    spans: list[tuple[int, int, int]]
    """Source, slot and bytes of each part that adjoins."""
    slots: range
    """From the first of its slots to the last."""
    generations: bytes
    """Of all of `slots`, as gates are written; nothing if it does not have all."""
    is_over: bool = False
    left: list[Source] = field(default_factory=list)
    """Sources that nobody but NIXL needs any more."""


@dataclass(slots=True, eq=False)
class Given:
    """A source in use, and where in its reader's memory its block belongs."""

    source: Source
    ref: SlotRef
    slot_at: int
    batch: Batch | None = None


class NixlWriter:
    """The writer's side of one endpoint.

    Args:
        endpoint: The reader's, as a ticket has it.
        shared: This process's agent.
        stall_s: How long a write may take beyond what its bytes need; NIXL reports no hung peer.
    """

    def __init__(self, endpoint: LinkEndpoint, shared: NixlWriting, *, stall_s: float) -> None:
        if not (0 < endpoint.slots < 1 << 32 and 0 < endpoint.slot_bytes < 1 << 32):
            raise Incompatible(f"no {endpoint.slots} slots of {endpoint.slot_bytes} bytes can be")
        self._address = NixlAddress.parse(endpoint.address)
        self._slots, self._slot_bytes = endpoint.slots, endpoint.slot_bytes
        self._shared = shared
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._given: dict[SlotRef, Given] = {}
        self._gates: tuple[memoryview, int] | None = None
        self._writing: Future[None] | None = None
        self._until_s = 0.0
        self._failed_s: float | None = None
        self._greeted_s = 0.0
        self._loaded = self._closed = False

    @property
    def is_ready(self) -> bool:
        """Whether `connect` has nothing to do."""
        return self._loaded and not self._closed and self._failed_s is None

    def connect(self) -> None:
        """Load the reader's agent, and provide memory to send from.

        Raises:
            LinkBroken: it is not there, it failed a moment ago, or a write to it has not ended.
            Incompatible: its metadata is another agent's.
        """
        if self.is_ready:
            return
        if self._closed:
            raise LinkBroken("the link is closed")
        if self._writing is not None and not self._writing.done():
            raise LinkBroken(f"{self._address.agent}: an earlier write has not ended")
        if self._failed_s is not None and time.monotonic() < self._failed_s + _RETRY_S:
            raise LinkBroken(f"{self._address.agent} failed a moment ago")
        plane, address = self._shared.plane, self._address
        try:
            _within(plane.call(lambda _: plane.load(address.agent, address.metadata)), _CONNECT_S)
            self._provide()
            # The first contact takes 100 ms, and tells whether the reader can be reached at all.
            look = self._look_at_gates(range(self._slots))
            self._writing = plane.run(look, release=_nothing, proof=self._proof())
            _within(self._writing, _CONNECT_S)
        except DiptychError:
            self._failed_s = time.monotonic()
            raise
        self._failed_s, self._loaded = None, True

    def buffer(self, ref: SlotRef) -> memoryview:
        """Registered memory for one block."""
        address = self._address
        with self._lock:
            if self._closed:
                raise Refused(RefusalReason.UNKNOWN_TICKET, "the link is closed")
            closed = self._shared.closed_up_to(address.agent)
            if not 0 <= ref.slot < self._slots or ref.generation <= closed.get(ref.slot, 0):
                raise _closed(ref)
            given = self._given.get(ref)
            if given is None:
                source = self._shared.sources.take(self._slot_bytes)
                if source is None:
                    raise Refused(RefusalReason.NO_ROOM, "no registered memory to send from")
                slot_at = address.slots + ref.slot * address.stride_bytes
                given = self._given[ref] = Given(source, ref, slot_at)
            return memoryview(given.source.memory)

    def send(self, blocks: Sequence[tuple[SlotRef, memoryview]], seal: bytes = b"") -> None:
        """Post one write of all blocks, if their gates are open. The seal stays for the job."""
        self.connect()
        sizes = [len(data) for _, data in blocks]
        batch = self._batch([ref for ref, _ in blocks], sizes)
        self._until_s = time.monotonic() + self._stall_s + sum(sizes) / _LEAST_BYTES_PER_S
        self._writing = self._shared.plane.run(
            self._write(batch), release=lambda: self._is_over(batch), proof=self._proof()
        )

    def confirm(self) -> None:
        """Wait until it has been written. Raises `LinkBroken` after a deadline of its own."""
        writing = self._writing
        if writing is None:
            raise LinkBroken("nothing was sent")
        try:
            _within(writing, self._until_s - time.monotonic())
        except Refused:
            raise
        except DiptychError as err:
            self._failed_s, self._loaded = time.monotonic(), False
            agent, plane = self._address.agent, self._shared.plane
            if writing.done():
                plane.call(lambda _: plane.unload(agent))
            raise LinkBroken(f"{agent}: {err}") from err

    def is_sending(self, ref: SlotRef) -> bool:
        """Whether NIXL may still read the buffer: till it says that the write is over."""
        with self._lock:
            given = self._given.get(ref)
            return given is not None and given.batch is not None and not given.batch.is_over

    def stop(self, ref: SlotRef) -> None:
        """Nothing more is written into the slot's buffer."""
        with self._lock:
            given = self._given.pop(ref, None)
            if given is None:
                return
            if given.batch is not None and not given.batch.is_over:
                given.batch.left.append(given.source)
            else:
                self._shared.sources.give_back(given.source)

    def reader_is_gone(self) -> bool:
        """Whether the last thing tried with it failed; looks for the next time whether it lives."""
        now_s = time.monotonic()
        if self.is_ready and now_s >= self._greeted_s + _GREET_EVERY_S:
            self._greeted_s = now_s
            self._shared.plane.call(lambda _: self._greet())
        return self._failed_s is not None

    def close(self) -> None:
        """Leave the endpoint. What is on its way keeps its source until it is over."""
        with self._lock:
            self._closed = True
        agent, plane = self._address.agent, self._shared.plane
        if self._loaded and (self._writing is None or self._writing.done()):
            self._loaded = False
            plane.call(lambda _: plane.unload(agent))

    def _greet(self) -> None:
        """On the plane's thread: see whether NIXL still knows the reader."""
        try:
            if self._loaded:
                self._shared.plane.note(self._address.agent, _GREETING)
        except PeerGone:
            self._failed_s, self._loaded = time.monotonic(), False
            if self._writing is None or self._writing.done():
                self._shared.plane.unload(self._address.agent)

    def _provide(self) -> None:
        if self._gates is None:
            n_bytes = (self._slots + 1) * _WORD_BYTES  # The last is where proofs land.
            memory, address = lasting(n_bytes)
            self._shared.plane.register(address, n_bytes)
            self._gates = memory.cast("Q"), address
        self._shared.sources.provide(self._slot_bytes, self._slots)

    def _batch(self, refs: Sequence[SlotRef], sizes: Sequence[int]) -> Batch:
        """What blocks are, all of them given here. Whatever can be done, for the plane copies.

        64 KiB cross in 6 us.
        """
        known = self._given
        slots = [ref.slot for ref in refs]
        span = range(min(slots), max(slots) + 1)
        in_turn = len(slots) == len(span) and slots == list(span)
        generations = array("Q", [ref.generation for ref in refs]).tobytes() if in_turn else b""
        with self._lock:
            try:
                given = [known[ref] for ref in refs]
            except KeyError as err:
                raise _closed(err.args[0]) from err
            if self._closed:
                raise _closed(refs[0])
            if [one for one in given if one.batch is not None and not one.batch.is_over]:
                raise LinkBroken(f"{self._address.agent}: an earlier write has not ended")
            spans = joined(zip(given, sizes, strict=True))
            batch = Batch(self._address.agent, given, spans, span, generations)
            for one in given:
                one.batch = batch
            return batch

    def _is_over(self, batch: Batch) -> None:
        self._shared.on_their_way.discard(batch)
        with self._lock:
            batch.is_over = True
            for source in batch.left:
                self._shared.sources.give_back(source)

    def _look_at_gates(self, slots: range) -> Program[None]:
        assert self._gates is not None
        at, n_bytes = slots.start * _WORD_BYTES, len(slots) * _WORD_BYTES
        local = [(self._gates[1] + at, n_bytes, 0)]
        remote = [(self._address.gates + at, n_bytes, 0)]
        yield Post("READ", local, remote, self._address.agent)

    def _proof(self) -> Post:
        """What ends a doubt: see `nixl_plane`."""
        assert self._gates is not None
        landing = [(self._gates[1] + self._slots * _WORD_BYTES, _WORD_BYTES, 0)]
        remote = [(self._address.gates, _WORD_BYTES, 0)]
        return Post("READ", landing, remote, self._address.agent)

    def _write(self, batch: Batch) -> Program[None]:
        """On the plane's thread: look at the gates, then write."""
        yield from self._look_at_gates(batch.slots)
        self._check_gates(batch)
        self._shared.on_their_way.add(batch)
        local = [(source, n_bytes, 0) for source, _, n_bytes in batch.spans]
        remote = [(slot, n_bytes, 0) for _, slot, n_bytes in batch.spans]
        yield Post("WRITE", local, remote, batch.agent)

    def _check_gates(self, batch: Batch) -> None:
        """Raise `Refused` unless the reader has every slot open, by its gates as last seen."""
        assert self._gates is not None
        gates, slots = self._gates[0], batch.slots
        closed = self._shared.closed_up_to(batch.agent)
        if not closed and gates[slots.start : slots.stop].tobytes() == batch.generations:
            return
        for given in batch.given:
            ref = given.ref
            if gates[ref.slot] != ref.generation or ref.generation <= closed.get(ref.slot, 0):
                raise _closed(ref)


def joined(blocks: Iterable[tuple[Given, int]]) -> list[tuple[int, int, int]]:
    """Source, slot and bytes of each write: blocks that adjoin on both sides make one.

    Never across two registrations, though their memory should adjoin: NIXL knows each apart.
    """
    spans: list[tuple[int, int, int]] = []
    from_at = to_at = n_bytes = 0
    registered_at = -1
    for given, size in blocks:
        source = given.source
        if (
            source.address == from_at + n_bytes
            and given.slot_at == to_at + n_bytes
            and source.registered_at == registered_at
        ):
            n_bytes += size
            continue
        if n_bytes:
            spans.append((from_at, to_at, n_bytes))
        from_at, to_at, n_bytes = source.address, given.slot_at, size
        registered_at = source.registered_at
    if n_bytes:
        spans.append((from_at, to_at, n_bytes))
    return spans


def _within(future: "Future[Any]", timeout_s: float) -> None:
    try:
        future.result(max(0.0, timeout_s))
    except TimeoutError as err:
        raise LinkBroken(f"not over after {timeout_s:.1f} s: its peer may be hung") from err


def _nothing() -> None:
    """A read of gates holds nothing."""


def _closed(ref: SlotRef) -> Refused:
    detail = f"slot {ref.slot} is closed for generation {ref.generation}"
    return Refused(RefusalReason.UNKNOWN_TICKET, detail)

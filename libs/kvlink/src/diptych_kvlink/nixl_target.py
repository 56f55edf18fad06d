"""The `nixl` link, reader's side: registered slots that writers write by themselves.

**Who may write.** Whoever has the agent's metadata: it is told in tickets only, over the bus, which
knows who asks. NIXL checks no ticket, and gives all slots or none. So, as with shared memory, a
hand-over needs the ticket and the bytes their checksums: nothing else is ever decoded.

**When slots are free.** Closing a gate stops a writer that looks, and none that is under way; to
deregister stops nobody (measured: the bytes were overwritten). So a slot stays in quarantine until
its writer said that nothing is on its way to it (`nixl_notes`; it is asked), or is proved dead and
what it had sent has been taken in. On one host a lock file proves that; from elsewhere, NIXL's own
word that the connection is gone.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from diptych_contracts.errors import DiptychError, Refused
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink.lockfile import host_id
from diptych_kvlink.nixl_address import KIND, NixlAddress
from diptych_kvlink.nixl_library import LOOPBACK
from diptych_kvlink.nixl_notes import MOST_SLOTS, NONCE_BYTES, Ask, Stopped, unpack
from diptych_kvlink.nixl_plane import PeerGone, Plane
from diptych_kvlink.nixl_sources import address_of, keep_for_life, lasting
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.port import CLOSED
from diptych_kvlink.presence import Witness

_WORD_BYTES = 8
_ASK_EVERY_S, _PROBE_EVERY_S = 0.1, 1.0
_DRAIN_S = 0.5
"""From a writer's death until what it had sent has been taken in: a hundred polls."""
_REMEMBERED = 1024
_MOST_AGENT_BYTES = 65_536


class _Writer:
    """What is known of one writer."""

    def __init__(self, agent: str, metadata: bytes) -> None:
        self.agent, self.metadata = agent, metadata
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.asked_s = self.probed_s = float("-inf")
        self.gone_s: float | None = None
        self.is_local = False


class NixlTarget:
    """The reader's slots behind a NIXL agent.

    Args:
        name: The reader's incarnation.
        slots: The memory, all of one mapping, `shape.stride_bytes` apart.
        shape: Of it.
        network: See `nixl_library`.
        directory: Where writers of this host hold their lock files.

    Raises:
        Permanent: there is no NIXL, or it does not start.
    """

    def __init__(
        self,
        name: str,
        slots: Sequence[memoryview],
        *,
        shape: PoolShape,
        network: str,
        directory: Path,
    ) -> None:
        self._slots = list(slots)
        self._lock = threading.Lock()
        self._writers: OrderedDict[Incarnation, _Writer] = OrderedDict()
        self._held: dict[int, tuple[SlotRef, Incarnation]] = {}
        self._idle: dict[int, int] = {}
        self._open = 0
        gates, gates_at = lasting(shape.slots * _WORD_BYTES)
        self._gates = gates.cast("Q")
        self._plane = Plane(name, network=network, heard=self._hear)
        try:
            start = address_of(slots[0])
            keep_for_life(slots[0])
            self._plane.register(gates_at, shape.slots * _WORD_BYTES)
            self._plane.register(start, (shape.slots - 1) * shape.stride_bytes + shape.slot_bytes)
            metadata = self._plane.metadata()
        except BaseException:
            self._plane.close()
            raise
        self._witness = Witness(directory)
        here = host_id(directory) if network == LOOPBACK else ""
        address = NixlAddress(self._plane.name, start, shape.stride_bytes, gates_at, metadata)
        self._endpoint = LinkEndpoint(
            kind=KIND,
            host=here,
            address=str(address),
            slots=shape.slots,
            slot_bytes=shape.slot_bytes,
        )

    @property
    def endpoint(self) -> LinkEndpoint:
        """Where writers find the slots: for the holder of a ticket only (`published`)."""
        return self._endpoint

    @property
    def stops_writers(self) -> bool:
        """Never: NIXL has nothing to stop one with."""
        return False

    def admit(
        self,
        slot: int,
        generation: int,
        writer: Incarnation | None = None,
        transfer_id: TransferId | None = None,
    ) -> None:
        """From now on let in only writes under `generation`; 0 lets none in."""
        was_open = self._gates[slot] != CLOSED
        self._gates[slot] = generation
        self._open += (generation != CLOSED) - was_open
        self._plane.attentive = self._open > 0
        if generation != CLOSED and writer is not None:
            with self._lock:
                self._idle.pop(slot, None)
                self._held[slot] = (SlotRef(slot=slot, generation=generation), writer)

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot, read-only."""
        return self._slots[slot][:n_bytes].toreadonly()

    def is_idle(self, ref: SlotRef) -> bool:
        """Whether its writer has said so; else it is asked, and may have said so next time."""
        held = self._held.get(ref.slot)
        if held is None or held[0] != ref:
            return True  # Never open here under that generation.
        if self._idle.get(ref.slot) == ref.generation:
            return True
        self._ask(held[1], _ASK_EVERY_S)
        return False

    def expect(self, writer: Incarnation, certificate: bytes = b"", agent: bytes = b"") -> None:
        """Remember `writer` and how to ask it. Raises `Refused`."""
        name, _, metadata = agent.partition(b"/")
        if not (0 < len(name) <= 128 and metadata and len(agent) <= _MOST_AGENT_BYTES):
            raise Refused(RefusalReason.UNSUPPORTED, f"{writer} announced no NIXL agent")
        self._witness.expect(writer)
        known = self._writers.get(writer)
        if known is None:
            known = _Writer(name.decode("ascii", "replace"), metadata)
            with self._lock:
                self._writers[writer] = known
                if len(self._writers) > _REMEMBERED:
                    self._writers.popitem(last=False)
        elif known.metadata != metadata:
            raise Refused(RefusalReason.UNSUPPORTED, f"{writer} was announced with another agent")
        known.is_local = self._witness.knows(writer)
        if not known.is_local:
            known.gone_s = None  # It asks: it lives.

    def is_dead(self, writer: Incarnation) -> bool:
        """Whether `writer` is gone, for so long that nothing of it is left in the network."""
        known = self._writers.get(writer)
        if known is None:
            return False
        if self._witness.is_dead(writer):
            if known.gone_s is None:
                known.gone_s = time.monotonic()
        elif known.gone_s is None or known.is_local:
            self._ask(writer, _PROBE_EVERY_S)
            return False
        return time.monotonic() >= known.gone_s + _DRAIN_S

    def close(self) -> None:
        """End the agent: nothing arrives any more. The memory stays mapped. Idempotent."""
        self._plane.close()
        self._witness.close()

    def _ask(self, writer: Incarnation, every_s: float) -> None:
        """Ask `writer` about its closed slots, unless that was done just now."""
        known, now_s = self._writers.get(writer), time.monotonic()
        if known is None or now_s < known.asked_s + every_s:
            return
        known.asked_s = now_s
        with self._lock:
            refs = [
                ref
                for ref, held_by in self._held.values()
                if held_by == writer
                and self._gates[ref.slot] == CLOSED
                and self._idle.get(ref.slot) != ref.generation
            ]
        ask = Ask(known.nonce, tuple(refs[:MOST_SLOTS]), self._endpoint.address).pack()
        self._plane.call(lambda _: self._tell(known, ask))

    def _tell(self, known: _Writer, ask: bytes) -> None:
        try:
            self._plane.load(known.agent, known.metadata)
            self._plane.note(known.agent, ask)
        except PeerGone:
            self._plane.unload(known.agent)
            if known.gone_s is None and not known.is_local:
                known.gone_s = time.monotonic()
        except DiptychError:
            self._plane.unload(known.agent)

    def _hear(self, name: str, data: bytes) -> None:
        stopped = unpack(data)
        if not isinstance(stopped, Stopped):
            return
        with self._lock:
            for ref in stopped.refs:
                held, writer = self._held.get(ref.slot, (None, None))
                known = self._writers.get(writer) if writer is not None else None
                if held == ref and known is not None and known.nonce == stopped.nonce:
                    self._idle[ref.slot] = ref.generation

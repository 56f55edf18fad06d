"""The port: what a KV link must do on each side.

A link moves bytes from the writer (a prefill worker) into slots that belong to the reader (a decode
worker). It knows nothing of leases: `incoming` and `outgoing` do. Every link promises that after
`admit(slot, 0)` a writer *that asks* is refused; none promises to stop one that is mid-write, which
is why slots are quarantined.
"""

from typing import Protocol

from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint, SlotRef

CLOSED = 0
"""The generation under which nobody may write."""


class LinkTarget(Protocol):
    """The reader's side: it owns the slots."""

    @property
    def endpoint(self) -> LinkEndpoint:
        """Where writers find the slots."""
        ...

    def admit(self, slot: int, generation: int) -> None:
        """From now on let in only writes under `generation`; `CLOSED` lets none in."""
        ...

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot, read-only. The caller releases it."""
        ...

    def is_idle(self, ref: SlotRef) -> bool:
        """Whether no writer has the slot open under this generation.

        Asked only of slots that were closed a while ago: then no writer can open it any more.
        """
        ...

    def expect(self, writer: Incarnation) -> None:
        """Remember `writer`, so that its death can be proved later."""
        ...

    def is_dead(self, writer: Incarnation) -> bool:
        """Whether it is *proved* that `writer` runs no more. Frozen or unknown gives False."""
        ...

    def close(self) -> None:
        """Give the slots up."""
        ...


class LinkWriter(Protocol):
    """The writer's side of one endpoint."""

    def buffer(self, ref: SlotRef) -> memoryview:
        """Memory for one block, a full slot long. Does not block.

        Raises:
            Refused: (`unknown_ticket`) the reader has closed the slot for this generation.
        """
        ...

    def send(self, ref: SlotRef, n_bytes: int) -> None:
        """Make the block in the slot's buffer arrive. May block: called on the link's thread.

        Raises:
            Refused: (`unknown_ticket`) the reader has closed the slot meanwhile.
        """
        ...

    def stop(self, ref: SlotRef) -> None:
        """Say that nothing more is written into the slot's buffer. Idempotent."""
        ...

    def reader_is_gone(self) -> bool:
        """Whether the endpoint does not exist any more."""
        ...

    def close(self) -> None:
        """Leave the endpoint. Buffers that are still in use stay valid until they are dropped."""
        ...

"""The port: what a KV link must do on each side.

A link moves bytes from the writer (a prefill worker) into slots that belong to the reader (a decode
worker). It knows nothing of leases: `incoming` and `outgoing` do. Every link promises that after
`admit(slot, CLOSED)` a writer *that asks* is refused. One that also `stops_writers` promises that
not a byte changes after that; the slots of the others are quarantined.
"""

from collections.abc import Sequence
from typing import Protocol

from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.transfers import LinkEndpoint, SlotRef

CLOSED = 0
"""The generation under which nobody may write."""


class LinkTarget(Protocol):
    """The reader's side: it owns the slots."""

    @property
    def endpoint(self) -> LinkEndpoint:
        """Where writers find the slots."""
        ...

    @property
    def stops_writers(self) -> bool:
        """Whether a slot just closed cannot change any more, whatever its writer does."""
        ...

    def admit(
        self,
        slot: int,
        generation: int,
        writer: Incarnation | None = None,
        transfer_id: TransferId | None = None,
    ) -> None:
        """From now on let in only `writer`, for that transfer, under `generation`.

        `CLOSED` lets nobody in.
        """
        ...

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot, read-only. The caller releases it."""
        ...

    def is_idle(self, ref: SlotRef) -> bool:
        """Whether no writer has the slot open under this generation.

        Asked only of slots that were closed a while ago: then no writer can open it any more.
        """
        ...

    def expect(self, writer: Incarnation, certificate: bytes = b"", agent: bytes = b"") -> None:
        """Remember `writer`, so that it is known when it comes, and its end can be proved later.

        Raises:
            Refused: `certificate` or `agent` is not what the link needs to know it by.
        """
        ...

    def is_dead(self, writer: Incarnation) -> bool:
        """Whether it is *proved* that nothing more can come from `writer` under what it has.

        Silence proves nothing: a frozen or unknown writer gives False.
        """
        ...

    def close(self) -> None:
        """Give the slots up."""
        ...


class LinkWriter(Protocol):
    """The writer's side of one endpoint."""

    @property
    def is_ready(self) -> bool:
        """Whether `connect` has nothing to do."""
        ...

    def connect(self) -> None:
        """Get ready to send. May block: called on the link's thread.

        Raises:
            LinkBroken: the endpoint cannot be reached.
            Incompatible: it is not what it says it is.
        """
        ...

    def buffer(self, ref: SlotRef) -> memoryview:
        """Memory for one block, a full slot long. Does not block.

        Raises:
            Refused: (`unknown_ticket`) the reader has closed the slot for this generation.
        """
        ...

    def send(self, blocks: Sequence[tuple[SlotRef, memoryview]], seal: bytes = b"") -> None:
        """Send blocks on their way, each from its slot's buffer. May block: on the link's thread.

        Args:
            blocks: All of one ticket.
            seal: That ticket's, to be shown where a link cannot tell its writers apart without.

        Raises:
            Refused: (`unknown_ticket`) the reader has closed a slot meanwhile.
            LinkBroken: the link failed; nothing sent counts.
        """
        ...

    def confirm(self) -> None:
        """Wait until what was sent has arrived. Same thread, same errors as `send`."""
        ...

    def is_sending(self, ref: SlotRef) -> bool:
        """Whether something of the slot's buffer may still be on its way, whoever gave up on it."""
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

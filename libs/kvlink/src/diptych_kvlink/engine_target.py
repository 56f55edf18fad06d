"""The link that is none: engines that move KV themselves need a seat and a seal, but no slots."""

from diptych_contracts.handoffs import LINK
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.transfers import LinkEndpoint, SlotRef


class EngineTarget:
    """A `port.LinkTarget` without slots, into which nothing is ever written."""

    endpoint = LinkEndpoint(kind=LINK, host="", address="", slots=0, slot_bytes=0)
    stops_writers = True

    def admit(
        self,
        slot: int,
        generation: int,
        writer: Incarnation | None = None,
        transfer_id: TransferId | None = None,
    ) -> None:
        """Never called: there is no slot."""
        raise IndexError(f"link {LINK!r} has no slot {slot}")

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """Never called: there is no slot."""
        raise IndexError(f"link {LINK!r} has no slot {slot}")

    def is_idle(self, ref: SlotRef) -> bool:
        """Nobody writes."""
        return True

    def expect(self, writer: Incarnation, certificate: bytes = b"") -> None:
        """Nobody comes."""

    def is_dead(self, writer: Incarnation) -> bool:
        """Never proved here: a ticket ends by its lease, or by its scheduler's cancel."""
        return False

    def close(self) -> None:
        """Nothing to give up."""

"""The slots of a reader's transfers: which link may write them, who looks, when they are free.

All links write into one set of slots, so each further link costs no memory. A transfer is open on
one link at a time; on the others its slots are closed.
"""

from diptych_contracts.errors import Refused
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink.ledger import Transfer, TransferLedger
from diptych_kvlink.port import CLOSED, LinkTarget
from diptych_kvlink.slots import SlotPool


class HeldSlots:
    """What the transfers of `ledger` hold. On one thread, as its caller."""

    def __init__(
        self, targets: tuple[LinkTarget, ...], pool: SlotPool, ledger: TransferLedger
    ) -> None:
        self.targets = targets
        self.pool = pool
        self._ledger = ledger
        self._via: dict[TransferId, LinkTarget] = {}
        self._refs: dict[TransferId, tuple[SlotRef, ...]] = {}
        self._views: dict[TransferId, list[memoryview]] = {}
        self._done_reading: set[TransferId] = set()

    def target(self, link: str) -> LinkTarget:
        """The link of that kind. Raises `Refused` (`unsupported`)."""
        for target in self.targets:
            if target.endpoint.kind == link:
                return target
        offered = " or ".join(repr(target.endpoint.kind) for target in self.targets)
        raise Refused(RefusalReason.UNSUPPORTED, f"link {link!r}; expected {offered}")

    def refs(self, transfer: Transfer) -> tuple[SlotRef, ...]:
        """Its slots, block by block."""
        return self._refs[transfer.transfer_id]

    def endpoint(self, transfer: Transfer) -> LinkEndpoint:
        """Of the link it is open on."""
        return self._via[transfer.transfer_id].endpoint

    def is_open_on(self, transfer: Transfer, target: LinkTarget) -> bool:
        """Whether that is the link it is open on."""
        return self._via[transfer.transfer_id] is target

    def give(self, transfer: Transfer, refs: tuple[SlotRef, ...], target: LinkTarget) -> None:
        """Open the slots `refs` to the writer of a new transfer, on `target`."""
        self._refs[transfer.transfer_id] = refs
        self._open(transfer, target)

    def move(self, transfer: Transfer, target: LinkTarget) -> None:
        """Close a transfer's slots where they are open, and open them on `target`."""
        self.close(transfer)
        self._open(transfer, target)

    def close(self, transfer: Transfer) -> None:
        """Let its writer in no more."""
        target = self._via[transfer.transfer_id]
        for ref in self.refs(transfer):
            target.admit(ref.slot, CLOSED)

    def view(self, transfer: Transfer, ref: SlotRef, n_bytes: int) -> memoryview:
        """The first `n_bytes` of one of its slots, until `reader_is_done`."""
        transfer.reader_may_read = True
        view = self._via[transfer.transfer_id].view(ref.slot, n_bytes)
        self._views.setdefault(transfer.transfer_id, []).append(view)
        return view

    def is_idle(self, transfer: Transfer) -> bool:
        """Whether its writer has none of its slots open; to be asked long after `close`."""
        target = self._via[transfer.transfer_id]
        return all(target.is_idle(ref) for ref in self.refs(transfer))

    def has_dead_writer(self, transfer: Transfer) -> bool:
        """Whether it is proved that nothing more can come."""
        writer: Incarnation | None = transfer.writer
        return writer is not None and self._via[transfer.transfer_id].is_dead(writer)

    def reader_is_done(self, transfer: Transfer) -> None:
        """Nobody here looks at its slots any more."""
        self._done_reading.add(transfer.transfer_id)
        self.settle()

    def settle(self) -> None:
        """Close, quarantine and free what the ledger's ended transfers allow."""
        for transfer in self._ledger:
            if not transfer.is_open:
                self.close(transfer)
                self.pool.quarantine(self.refs(transfer))
                if self._via[transfer.transfer_id].stops_writers:
                    transfer.writer_may_write = False
                if transfer.transfer_id in self._done_reading:
                    self._drop_views(transfer)
        for transfer in self._ledger.take_settled():
            self._done_reading.discard(transfer.transfer_id)
            del self._via[transfer.transfer_id]
            self.pool.free(self._refs.pop(transfer.transfer_id))

    def check(self) -> None:
        """Raise `AssertionError` if a slot has no transfer, or two."""
        self.pool.check()
        assert self.pool.used == sum(map(len, self._refs.values())), "a slot has no ticket"
        assert {transfer.transfer_id for transfer in self._ledger} == self._refs.keys()

    def shut(self) -> None:
        """Give the links up. Views still in use stay valid until they are dropped."""
        self._views.clear()
        for target in self.targets:
            target.close()

    def _open(self, transfer: Transfer, target: LinkTarget) -> None:
        self._via[transfer.transfer_id] = target
        transfer.link = target.endpoint.kind
        transfer.tls = bool(target.endpoint.certificate)
        for ref in self.refs(transfer):
            target.admit(ref.slot, ref.generation, transfer.writer, transfer.transfer_id)

    def _drop_views(self, transfer: Transfer) -> None:
        """Invalidate the views; one an engine still has a buffer on is left for a later sweep."""
        views = self._views.pop(transfer.transfer_id, [])
        in_use = [view for view in views if not _invalidate(view)]
        transfer.reader_may_read = bool(in_use)
        if in_use:
            self._views[transfer.transfer_id] = in_use


def _invalidate(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True

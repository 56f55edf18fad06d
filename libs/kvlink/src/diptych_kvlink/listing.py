"""A reader's transfers, as `diptych kv` shows them."""

from diptych_contracts.control import KvTransfer
from diptych_contracts.ids import TransferId
from diptych_kvlink.ledger import Over, Transfer


def held(transfer: Transfer, now_s: float) -> KvTransfer:
    """A transfer whose slots are not free yet."""
    left_s = transfer.deadline_s - now_s if transfer.is_open else 0.0
    return KvTransfer(
        transfer_id=transfer.transfer_id,
        state=transfer.state,
        writer=transfer.writer or "",
        link=transfer.link,
        tls=transfer.tls,
        sealed=bool(transfer.sealing_key),
        codec=transfer.codec,
        age_ms=round((now_s - transfer.opened_s) * 1000),
        left_ms=round(left_s * 1000),
        n_bytes=transfer.n_bytes,
        reason=transfer.reason,
    )


def over(transfer_id: TransferId, how: Over) -> KvTransfer:
    """A transfer that nobody touches any more."""
    return KvTransfer(
        transfer_id=transfer_id,
        state=how.state,
        writer=how.writer or "",
        link=how.link,
        tls=how.tls,
        sealed=how.sealed,
        codec=how.codec,
        n_bytes=how.n_bytes,
        reason=how.reason,
    )

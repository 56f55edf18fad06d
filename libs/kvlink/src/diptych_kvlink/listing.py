"""Transfers as `diptych kv` shows them: what their reader knows (of the writer: `outgoing_log`)."""

from collections.abc import Iterable

import msgspec

from diptych_contracts.control import KvStep, KvTransfer
from diptych_contracts.ids import TransferId
from diptych_contracts.transfers import SlotRef
from diptych_kvlink.ledger import Over, Step, Transfer


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
        blocks=transfer.blocks,
        held_blocks=transfer.held_blocks,
        reason=transfer.reason,
        ended_ms=0 if transfer.is_open else since_end_ms(transfer.steps, now_s),
        in_quarantine=not transfer.is_open,
    )


def over(transfer_id: TransferId, how: Over, now_s: float) -> KvTransfer:
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
        blocks=how.blocks,
        held_blocks=how.held_blocks,
        reason=how.reason,
        ended_ms=since_end_ms(how.steps, now_s),
    )


def with_steps(told: KvTransfer, steps: Iterable[Step], now_s: float) -> KvTransfer:
    """`told`, and the way it went."""
    return msgspec.structs.replace(
        told,
        steps=tuple(
            KvStep(
                state=step.state, ago_ms=round((now_s - step.at_s) * 1000, 3), reason=step.reason
            )
            for step in tuple(steps)
        ),
    )


def with_slots(told: KvTransfer, refs: Iterable[SlotRef]) -> KvTransfer:
    """`told`, and the slots it holds."""
    kept = tuple(refs)
    return msgspec.structs.replace(
        told,
        slots=tuple(ref.slot for ref in kept),
        generations=tuple(ref.generation for ref in kept),
    )


def since_end_ms(steps: Iterable[Step], now_s: float) -> int:
    """Since the last of `steps`; at least 1."""
    last = tuple(steps)[-1:]
    return max(1, round((now_s - last[0].at_s) * 1000)) if last else 1

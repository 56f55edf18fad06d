"""What becomes of a request whose idempotency key is known already.

A key is claimed before its request is stored, so a gateway may die between the two. What tells
whether the request exists is its record: whoever creates that first decides. A scheduler that does
has taken the request; a gateway that does has withdrawn it, and whatever stores it later finds it
cancelled. So the same key never runs twice, and is never blocked.
"""

from enum import Enum, auto

from diptych_contracts.idempotency import Claim, ClaimState
from diptych_contracts.requests import RecordState, RequestRecord


class Step(Enum):
    """What to do with a request that came with a key."""

    RUN = auto()
    """Nobody runs it: claim the key, and do."""
    DIFFERENT = auto()
    """The key stands for another body."""
    REPLAY = auto()
    """Say the answer that is kept."""
    JOIN = auto()
    """Read along."""
    WAIT = auto()
    """Its gateway may be about to store it: look again."""
    WITHDRAW = auto()
    """Its gateway will not store it any more: have its record say so, and look again."""


def next_step(
    claim: Claim | None, record: RequestRecord | None, *, digest: str, now_unix_ms: int
) -> Step:
    """The step that `claim` and the record of its request lead to.

    Args:
        claim: What the key stands for.
        record: Of the claim's request; None if there is none (yet, or any more).
        digest: Of the body that came now.
        now_unix_ms: The server's time.
    """
    if claim is None or claim.state is ClaimState.FREE:
        return Step.RUN
    if claim.digest != digest:
        return Step.DIFFERENT
    if claim.state is ClaimState.ENDED:
        return Step.REPLAY
    if record is not None:
        return Step.RUN if came_to_nothing(record) else Step.JOIN
    if claim.state is ClaimState.STORED:
        return Step.JOIN
    return Step.WAIT if now_unix_ms < claim.give_up_unix_ms else Step.WITHDRAW


def came_to_nothing(record: RequestRecord) -> bool:
    """Whether a request ends without an answer: cancelled, expired, failed."""
    if record.end is not None:
        return not record.end.reason.is_finish
    return record.state is RecordState.CANCELLING

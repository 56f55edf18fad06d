"""What somebody says in a request's journal who has no right to: a bad worker, or a thief."""

from collections.abc import Sequence

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import (
    AttemptFailed,
    End,
    EndReason,
    Fence,
    JournalEntry,
    Started,
    TokenEntry,
    TokenFrame,
)
from diptych_policy.journal import JournalPart

THIEF = Incarnation("decode-worker-00000000bad0")
POISON = 7
"""The token that no answer here has."""


def forgeries(
    request_id: RequestId, attempt: int, voice: bytes, *, index: int = 0
) -> tuple[JournalPart, ...]:
    """Every kind of part, for that attempt, and a fence for the next one."""
    return (
        TokenEntry(
            request_id=request_id,
            attempt=attempt,
            index=index,
            token_ids=(POISON,) * 3,
            voice=voice,
        ),
        End(
            request_id=request_id,
            attempt=attempt,
            reason=EndReason.FAILED,
            detail="forged",
            voice=voice,
        ),
        Fence(request_id=request_id, attempt=attempt + 1, voice=voice),
        Started(request_id=request_id, attempt=attempt, worker=THIEF, phase="decode", voice=voice),
        AttemptFailed(
            request_id=request_id,
            attempt=attempt,
            worker=THIEF,
            reason="forged",
            retryable=False,
            voice=voice,
        ),
    )


def framed(parts: Sequence[JournalPart]) -> list[JournalEntry]:
    """`parts` as the journal takes them: tokens only in a frame."""
    return [
        TokenFrame(worker=THIEF, entries=(part,)) if isinstance(part, TokenEntry) else part
        for part in parts
    ]

"""What a worker is told of a sequence that failed."""

from diptych_contracts.errors import (
    ContextOverflow,
    DiptychError,
    Incompatible,
    Permanent,
    Refused,
    Unverified,
)
from diptych_contracts.jobs import RefusalReason
from diptych_engine.port import SequenceFailed, SequenceKey


def failed(key: SequenceKey, error: DiptychError) -> SequenceFailed:
    """`error` as news of the sequence."""
    match error:
        case Unverified():
            reason = RefusalReason.UNVERIFIED_KV.value
        case ContextOverflow():
            reason = "context_overflow"
        case Refused():
            reason = str(error.reason)
        case _:
            reason = "engine_error"
    permanent = isinstance(error, Permanent) and not isinstance(error, Incompatible)
    return SequenceFailed(key, reason, str(error), permanent=permanent)

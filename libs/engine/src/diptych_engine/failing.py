"""What is told of a sequence that failed, and the end of a process whose engine did."""

import os
import sys

from diptych_contracts.errors import (
    ContextOverflow,
    DiptychError,
    EngineGone,
    Incompatible,
    Permanent,
    Refused,
    Unverified,
)
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.tracebacks import told
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
        case EngineGone():
            reason = "engine_gone"
        case _:
            reason = "engine_error"
    permanent = isinstance(error, Permanent) and not isinstance(error, Incompatible)
    return SequenceFailed(key, reason, str(error), permanent=permanent)


def end_process(error: BaseException) -> None:
    """Tell of `error` and end the process at once; recovery takes over."""
    sys.stderr.write(f"{told(error)}\n")
    os._exit(70)

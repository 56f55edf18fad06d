"""What Triton's errors mean to a worker.

Errors on a stream come as text, without a status: they are told apart by it. What no pattern knows
is tried elsewhere, since a model that fails one request may be at fault as well as the request.
"""

import re

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_contracts.jobs import RefusalReason

FAILED = "engine_error"
_NO_ROOM = re.compile(r"maximum queue size|request timeout expired|no room|out of memory", re.I)
_GONE = re.compile(
    r"unknown model|not found|not ready|no available versions|unloaded|shutting down|"
    r"stub process|failed to enqueue",
    re.I,
)
_WRONG = re.compile(
    r"unexpected (shape|inference|data|datatype)|unexpected .* input|expected|invalid|must be|"
    r"prompt length|exceeds? (the )?max|not support|does not support|out of range|"
    r"context_?phase_?params",
    re.I,
)
_RPC_NO_ROOM = ("RESOURCE_EXHAUSTED",)
_RPC_WRONG = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "OUT_OF_RANGE")


def of_stream(text: str) -> DiptychError:
    """The error that a stream's text tells of."""
    if _NO_ROOM.search(text):
        return Refused(RefusalReason.NO_ROOM, text)
    if _GONE.search(text):
        return EngineGone(f"triton: {text}")
    if _WRONG.search(text):
        return Permanent(f"triton: {text}")
    return Refused(FAILED, text)


def of_call(code: str, text: str) -> DiptychError:
    """The error that a gRPC status tells of."""
    name = code.removeprefix("StatusCode.")
    if name in _RPC_NO_ROOM:
        return Refused(RefusalReason.NO_ROOM, text)
    if name in _RPC_WRONG:
        return Permanent(f"triton: {text}")
    return EngineGone(f"triton: {name}: {text}")

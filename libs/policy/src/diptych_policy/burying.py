"""What is kept of a request that could not be served: for stream `DEAD`, and for the event."""

import msgspec

from diptych_contracts.dead import Cause, DeadRequest
from diptych_contracts.events import RequestDied
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import Request, RequestRecord
from diptych_policy.lifecycle import Announce, Bury, Effect
from diptych_policy.limits import Limits
from diptych_policy.suspicion import suspected


def is_dead(record: RequestRecord, end: End, limits: Limits) -> bool:
    """Whether a person should see how it ended: it failed, or was suspected to the last."""
    suspect = suspected(record, limits)
    return end.reason is EndReason.FAILED or (end.reason is EndReason.EXPIRED and suspect)


def buried(
    record: RequestRecord, end: End, *, request: Request | None, tokens: int, unix_ms: int
) -> list[Effect]:
    """Keep `request` in `DEAD`, and say so; what nobody can read is kept there as it came."""
    dead = DeadRequest(
        request_id=record.request_id,
        gateway=record.gateway,
        scheduler=record.owner,
        cause=_cause(record, end),
        detail=end.detail,
        request=_without_secret(request),
        attempts=record.attempt,
        lost_attempts=record.lost_attempts,
        adoptions=record.adoptions,
        setbacks=record.setbacks,
        tokens=tokens,
        died_unix_ms=unix_ms,
    )
    lost = [worker for setback in record.setbacks if setback.lost for worker in setback.workers]
    died = RequestDied(
        request_id=record.request_id,
        cause=dead.cause,
        detail=dead.detail,
        lost_attempts=record.lost_attempts,
        workers=tuple(dict.fromkeys(lost)),
    )
    request_id = record.request_id
    said = Announce(request_id, died, f"{request_id}.dead")
    return [said] if dead.cause is Cause.UNREADABLE else [Bury(request_id, dead), said]


def _without_secret(request: Request | None) -> Request | None:
    """A request that is tried again has a secret of its own."""
    return None if request is None else msgspec.structs.replace(request, secret=b"")


def _cause(record: RequestRecord, end: End) -> Cause:
    if end.cause in tuple(Cause):
        return Cause(end.cause)
    # An end that an older scheduler wrote, or a suspect's deadline.
    return Cause.LOST_WORKERS if record.lost_attempts else Cause.FAILED_ATTEMPTS

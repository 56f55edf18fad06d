"""What could not be served: stream `DEAD`, for a person to look at and perhaps to try again."""

from enum import StrEnum

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import Request, Setback
from diptych_contracts.wire import Message


class Cause(StrEnum):
    """Why a request `failed`; `End.cause` carries it to the client."""

    LOST_WORKERS = "lost_workers"
    """Its workers died or fell silent, attempt after attempt."""
    LOST_SCHEDULERS = "lost_schedulers"
    """Its schedulers died one after another, and it got no further."""
    FAILED_ATTEMPTS = "failed_attempts"
    """Live workers gave it up, attempt after attempt."""
    IMPOSSIBLE = "impossible"
    """A worker said that it would fail anywhere."""
    UNDELIVERABLE = "undeliverable"
    """Whoever pulled it from `REQUESTS` died or hung before its record stood."""
    UNREADABLE = "unreadable"
    """What stream `REQUESTS` holds is no request."""
    MISSING = "missing"
    """Its stored request is gone."""


class DeadRequest(Message, frozen=True, kw_only=True, tag="dead_request.1"):
    """A request that ended `failed`, whole, so that it can be tried again.

    On `dead.request.<id>`, once: its `Nats-Msg-Id` is the subject.
    """

    request_id: RequestId
    gateway: Incarnation
    scheduler: Incarnation
    """Who gave it up."""
    cause: Cause
    detail: str
    """What its client was told."""
    request: Request | None = None
    """Absent where it is gone, or too large to be stored beside all this."""
    attempts: int = 1
    lost_attempts: int = 0
    adoptions: int = 0
    setbacks: tuple[Setback, ...] = ()
    """Why its last attempts did not finish, oldest first."""
    tokens: int = 0
    """How many its answer had."""
    died_unix_ms: int
    trace_id: str = ""


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead_letter.1"):
    """A stored message that cannot be read, byte by byte.

    On `dead.<stream>`, once: its `Nats-Msg-Id` names stream and sequence.
    """

    subject: str
    reason: str
    payload: bytes
    request_id: str = ""
    """Empty if its headers name none."""
    gateway: str = ""
    died_unix_ms: int = 0
    trace_id: str = ""


class DeadRetried(Message, frozen=True, kw_only=True, tag="dead_retried.1"):
    """Somebody has tried a dead request again; on its subject, after it."""

    request_id: RequestId
    retried_as: RequestId
    """The new request."""
    retried_unix_ms: int


DeadEntry = DeadRequest | DeadLetter | DeadRetried
"""Everything stream `DEAD` may hold."""

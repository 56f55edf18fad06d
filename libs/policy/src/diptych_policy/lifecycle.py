"""What a scheduler hears (events, in the past tense) and what it orders (effects).

Effects about one request are performed in order, one after another. If a `SaveRecord` or
`CreateRecord` loses its compare-and-swap, the request's other pending effects are dropped and
`RecordSeen` tells the ledger what stands there.
"""

from dataclasses import dataclass

from diptych_contracts.dead import DeadRequest
from diptych_contracts.events import LifeCycleEvent
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import Cancel, Job, JobAnswer
from diptych_contracts.journal import End, Fence
from diptych_contracts.requests import Request, RequestRecord
from diptych_policy.journal import JournalPart

# Events


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request was pulled from stream `REQUESTS`."""

    request: Request
    request_seq: int
    journal_seq: int
    """Newest sequence of the journals' stream: all of its own entries are newer."""
    deliveries: int = 1
    """How often it has been pulled, this time included."""
    stored_unix_ms: int = 0
    """When it was stored, by the bus's clock: the one that all schedulers share."""


@dataclass(frozen=True, slots=True)
class RequestUnreadable:
    """What was pulled is no request, but its headers say whose it was."""

    request_id: RequestId
    gateway: Incarnation
    request_seq: int
    detail: str
    secret: bytes = b""
    """As its headers say it: its gateway believes no end without a voice."""


@dataclass(frozen=True, slots=True)
class RecordCreated:
    """This scheduler owns the request now."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RecordSeen:
    """The bucket holds this record: written by another, or found when a swap was lost."""

    record: RequestRecord
    revision: int = 0


@dataclass(frozen=True, slots=True)
class RecordGone:
    """The record was deleted or has expired."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RecordAdopted:
    """A dead scheduler's record is this one's now; `parts` is its journal so far."""

    record: RequestRecord
    request: Request | None
    parts: tuple[JournalPart, ...]
    until_seq: int = 0
    """How far that was read."""
    whole: bool = True
    """Whether the journal still holds all of it."""


@dataclass(frozen=True, slots=True)
class AdoptionLost:
    """A record to be adopted has moved on: this is what stands there."""

    record: RequestRecord
    revision: int


@dataclass(frozen=True, slots=True)
class Journalled:
    """A part of a followed journal, in stream order."""

    part: JournalPart
    seq: int = 0
    """Where the journal holds it."""


@dataclass(frozen=True, slots=True)
class JobAnswered:
    """A worker's typed answer; None if it is there but did not answer in time."""

    request_id: RequestId
    attempt: int
    worker: Incarnation
    answer: JobAnswer | None


@dataclass(frozen=True, slots=True)
class CancelUnheard:
    """A worker was lost before it acknowledged a cancel."""

    worker: Incarnation
    cancel: Cancel


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed, or the fleet has changed."""


@dataclass(frozen=True, slots=True)
class MemberWasLost:
    """A worker, gateway or scheduler is dead, or as good as."""

    member: Incarnation


@dataclass(frozen=True, slots=True)
class MemberWasFound:
    """A member beats for the first time, or again."""

    member: Incarnation


@dataclass(frozen=True, slots=True)
class AnswersAttended:
    """Clients of another gateway than their own read these answers now."""

    request_ids: tuple[RequestId, ...]


Event = (
    RequestArrived
    | RequestUnreadable
    | RecordCreated
    | RecordSeen
    | RecordGone
    | RecordAdopted
    | AdoptionLost
    | Journalled
    | JobAnswered
    | CancelUnheard
    | Ticked
    | MemberWasLost
    | MemberWasFound
    | AnswersAttended
)

# Effects


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """Write a record that must not exist; then `RecordCreated`."""

    record: RequestRecord


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """Compare-and-swap the record. A closed one expires after the resume window."""

    record: RequestRecord


@dataclass(frozen=True, slots=True)
class AdoptRecord:
    """Compare-and-swap a dead owner's record to this scheduler; then `RecordAdopted`.

    Lost, it gives `AdoptionLost`: `revision` is the one that the decision was made on.
    """

    record: RequestRecord
    revision: int


@dataclass(frozen=True, slots=True)
class SendJob:
    """Send until answered, while the attempt is current; then `JobAnswered`."""

    request_id: RequestId
    attempt: int
    worker: Incarnation
    job: Job


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Tell a worker to stop, until it acknowledges; `CancelUnheard` if it is lost before."""

    worker: Incarnation
    cancel: Cancel


@dataclass(frozen=True, slots=True)
class PublishFence:
    """Store a fence in the gateway's journal."""

    gateway: Incarnation
    fence: Fence


@dataclass(frozen=True, slots=True)
class PublishEnd:
    """Store an end in the gateway's journal."""

    gateway: Incarnation
    end: End


@dataclass(frozen=True, slots=True)
class Bury:
    """Keep a request that ended `failed` in stream `DEAD`, once."""

    request_id: RequestId
    dead: DeadRequest


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """Delete the stored request: it has ended."""

    request_id: RequestId
    request_seq: int
    prompt: str = ""
    """The object that holds its prompt, if one does."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish a life-cycle event, once per `msg_id`."""

    request_id: RequestId
    event: LifeCycleEvent
    msg_id: str
    first: bool = False
    """Whether what follows waits until it is stored."""


@dataclass(frozen=True, slots=True)
class Denounce:
    """Say that somebody spoke in a request's journal with a wrong voice; once per request."""

    request_id: RequestId
    said: str
    """What, by the name of its type."""
    attempt: int


Effect = (
    CreateRecord
    | SaveRecord
    | AdoptRecord
    | SendJob
    | CancelWork
    | PublishFence
    | PublishEnd
    | Bury
    | EraseRequest
    | Announce
    | Denounce
)

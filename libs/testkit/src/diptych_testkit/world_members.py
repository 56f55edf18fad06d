"""Schedulers and workers of a made-up world (`ledger_world`)."""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import Job, RefusalReason
from diptych_contracts.journal import AttemptFailed, TokenEntry
from diptych_contracts.requests import RequestRecord
from diptych_policy.fleet import Fleet
from diptych_policy.job_admission import JobAdmission
from diptych_policy.journal import JournalPart
from diptych_policy.lifecycle import (
    AdoptRecord,
    CancelWork,
    CreateRecord,
    Effect,
    JobAnswered,
    PublishEnd,
    PublishFence,
    SaveRecord,
    SendJob,
)
from diptych_policy.recovery import Ledger

TOKENS = 6
"""Of each answer: few, so that many requests end within a run."""


def said(request_id: RequestId, index: int) -> int:
    """The token every worker samples there."""
    return 1000 * int(request_id[1:]) + index


def request_of(effect: Effect) -> RequestId:
    """Which request an effect is about."""
    match effect:
        case CreateRecord(record) | SaveRecord(record) | AdoptRecord(record=record):
            return record.request_id
        case CancelWork(cancel=cancel):
            return cancel.request_id
        case PublishFence(fence=fence):
            return fence.request_id
        case PublishEnd(end=end):
            return end.request_id
        case _:
            return effect.request_id


@dataclass
class Running:
    """An attempt on a worker."""

    job: Job
    index: int
    phase: str


@dataclass
class Worker:
    """One worker's seats, and what it computes. Frozen, it says nothing until it wakes."""

    name: Incarnation
    admission: JobAdmission = field(
        default_factory=lambda: JobAdmission(max_sequences=3, kv_tokens=400)
    )
    running: dict[tuple[RequestId, int], Running] = field(default_factory=dict)
    unsaid: list[JournalPart] = field(default_factory=list)
    up: bool = True
    frozen: bool = False

    def leave(self, key: tuple[RequestId, int]) -> None:
        """An attempt frees its seat."""
        self.running.pop(key, None)
        self.admission.leave(*key)


class Scheduler:
    """One ledger, and what its shell would hold for it."""

    def __init__(self, name: Incarnation) -> None:
        self.name = name
        self.fleet = Fleet()
        self.ledger = Ledger(name, self.fleet)
        self.queues: dict[RequestId, deque[Effect]] = defaultdict(deque)
        self.side: list[SendJob | CancelWork] = []
        self.answers: list[JobAnswered] = []
        self.revisions: dict[RequestId, int] = {}
        self.watch: deque[tuple[RequestRecord, int]] = deque()
        self.journal_at = 0
        self.from_: dict[RequestId, int] = {}
        self.now_s = 0.0
        self.frozen = False
        self.closed: set[RequestId] = set()


def token(job: Job, index: int) -> TokenEntry:
    """What a worker says of one token."""
    generation = job.generation
    return TokenEntry(
        request_id=generation.request_id,
        attempt=generation.attempt,
        index=index,
        token_ids=(said(generation.request_id, index),),
        voice=generation.voice,
    )


def failed(worker: Worker, job: Job, reason: RefusalReason) -> AttemptFailed:
    """What a worker says that cannot go on."""
    generation = job.generation
    return AttemptFailed(
        request_id=generation.request_id,
        attempt=generation.attempt,
        worker=worker.name,
        reason=reason,
        voice=generation.voice,
    )

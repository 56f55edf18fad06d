"""One live request, as its owner knows it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from diptych_contracts.dead import Cause
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import Cancel, GenerateJob, Generation, Job, PrefillJob
from diptych_contracts.journal import AttemptFailed, End, EndReason, Fence
from diptych_contracts.requests import Assignment, Mode, Request, RequestRecord
from diptych_policy.attendance import Attendance
from diptych_policy.journal import RequestView
from diptych_policy.paths import PathRules
from diptych_policy.prefixes import PromptBlocks
from diptych_policy.routing import Company, Demand
from diptych_policy.voices import attempt_voice, owner_voice

NO_RULES = PathRules()


class Stage(StrEnum):
    """Where a request stands; `recovery` says what moves it on."""

    CREATING = "creating"
    QUEUED = "queued"
    ROUTED = "routed"
    FENCING = "fencing"
    ENDING = "ending"


class Booking(NamedTuple):
    """What an attempt was given room for at one worker."""

    tokens: int
    prefill_tokens: int
    """Of these, what the worker has to compute before the first token."""
    parking: str = ""
    """Where its KV waits for a seat; empty: it needs none, or has one."""
    parking_bytes: int = 0


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended. Times are the judge's, in seconds."""

    request: Request
    record: RequestRecord
    view: RequestView
    arrival: int
    stage: Stage
    since_s: float
    """When this stage began."""
    arrived_s: float
    progress_s: float
    """When the current attempt last added a token."""
    attendance: Attendance
    """Whether it is read; its gateway's concern while that lives."""
    decode_started: bool = False
    """A decode worker has its KV: it needs its prefill worker no more."""
    parked: bool = False
    """That KV waits for a seat: no token comes meanwhile."""
    failed: AttemptFailed | None = None
    """What was heard last of a worker that gave an attempt up."""
    failures: int = 0
    """Attempts that live workers gave up in a row."""
    refusals: int = 0
    """Times in a row that there was no room."""
    not_before_s: float = 0.0
    excluded: dict[Incarnation, float] = field(default_factory=dict)
    """Workers that said no, and until when that counts."""
    shared: bool = False
    """Whether another scheduler's suspect has been put beside it."""
    undeliverable: str = ""
    """Why it is not even tried."""
    unplaced: str = ""
    """Why no workers were found."""
    booked: dict[Incarnation, Booking] = field(default_factory=dict)
    """What is booked in the fleet, by worker."""
    unrecorded_s: float | None = None
    """Since when its record is missing: deleted, or expired while this scheduler slept."""
    end: End | None = None
    """The end its owner wants, once it is `ending`."""
    prompt: PromptBlocks = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = PromptBlocks.of(self.request)

    @property
    def added_tokens(self) -> int:
        """How many tokens the current attempt has brought."""
        return len(self.view.token_ids) - self.view.attempt_start

    def to(self, stage: Stage, *, now_s: float) -> None:
        """Enter `stage`."""
        self.stage = stage
        self.since_s = now_s

    def needs(self, worker: Incarnation) -> bool:
        """Whether the current attempt cannot go on without `worker`."""
        assignment = self.record.assignment
        if assignment is None or worker not in assignment.workers:
            return False
        return worker == assignment.decode or not self.decode_started

    def demand(
        self,
        *,
        company: Company = Company.ANY,
        unproven: frozenset[Incarnation] = frozenset(),
        rules: PathRules = NO_RULES,
    ) -> Demand:
        """What the next attempt needs."""
        done = len(self.view.token_ids)
        return Demand(
            model=self.request.model,
            prompt_tokens=self.request.prompt_tokens + done,
            answer_tokens=self.request.stopping.max_tokens - done,
            forced=self.request.forced,
            excluded=frozenset(self.excluded),
            prompt=self.prompt,
            request_id=self.request.request_id,
            company=company,
            unproven=unproven,
            deployment=rules.deployment,
            ttft_slo_s=rules.ttft_slo_s.get(self.request.priority_class, 0.0),
        )

    def job(self, assignment: Assignment, *, unix_ms: int) -> Job:
        """The current attempt as a job for `assignment.entry`."""
        request = self.request
        generation = Generation(
            request_id=request.request_id,
            attempt=self.record.attempt,
            gateway=request.gateway,
            model=request.model,
            tenant=request.tenant,
            prompt_ids=request.prompt_ids,
            prefix_ids=tuple(self.view.token_ids),
            sampling=request.sampling,
            stopping=request.stopping,
            budget_ms=max(0, self.record.deadline_unix_ms - unix_ms),
            prompt=request.prompt,
            voice=attempt_voice(request.secret, self.record.attempt),
        )
        if assignment.mode is Mode.LOCAL:
            return GenerateJob(generation=generation)
        return PrefillJob(
            generation=generation,
            decode_worker=assignment.decode,
            link=assignment.link or "",
            next_link=assignment.next_link,
            last_link=assignment.last_link,
            first_token_ms=int(request.deadlines.first_token_s * 1000),
            transfer_ms=int(request.deadlines.transfer_s * 1000),
            path=assignment.path,
        )

    def fence(self) -> Fence:
        """The announcement of the record's attempt."""
        return Fence(
            request_id=self.record.request_id,
            attempt=self.record.attempt,
            voice=owner_voice(self.request.secret),
        )

    def cancel(self) -> Cancel:
        """The order to stop the record's attempt and all before it."""
        return Cancel(request_id=self.record.request_id, attempt=self.record.attempt)

    def end_as(self, reason: EndReason, detail: str, cause: Cause | None = None) -> End:
        """An end of the current attempt."""
        return End(
            request_id=self.record.request_id,
            attempt=self.record.attempt,
            reason=reason,
            detail=detail,
            tokens=len(self.view.token_ids) if reason.is_finish else None,
            cause=cause or "",
        )

    def broken_invariants(self) -> Iterator[str]:
        """What should hold and does not."""
        stage, record = self.stage, self.record
        if stage is Stage.ROUTED and record.assignment is None:
            yield "a routed request has workers"
        if stage is Stage.QUEUED and record.assignment is not None:
            yield "a queued request has no workers"
        if stage is not Stage.ROUTED and self.booked:
            yield "only routed requests are booked"
        if self.view.end is not None:
            yield "an ended request is gone"
        if self.view.attempt > record.attempt:
            yield "the journal is never ahead of the record"

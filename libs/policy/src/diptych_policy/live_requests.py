"""The live requests of one scheduler, and the steps that its rules (`recovery`) are made of."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from diptych_contracts.dead import Cause
from diptych_contracts.events import RequestEnded, RequestRouted
from diptych_contracts.fleet import ClassQueue
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import (
    Assignment,
    PriorityClass,
    RecordState,
    Request,
    RequestRecord,
    Setback,
)
from diptych_policy.attendance import Attendance, orphan_grace_s
from diptych_policy.burying import buried, is_dead
from diptych_policy.drain_rate import DrainRate
from diptych_policy.fleet import Fleet
from diptych_policy.journal import RequestView, spoken
from diptych_policy.lifecycle import (
    Announce,
    CancelWork,
    Effect,
    EraseRequest,
    PublishEnd,
    PublishFence,
    SaveRecord,
    SendJob,
)
from diptych_policy.limits import Limits
from diptych_policy.live_request import LiveRequest, Stage
from diptych_policy.ordering import order_key
from diptych_policy.orphans import unneeded_prompt
from diptych_policy.placing import Placer
from diptych_policy.routing import Company, Demand
from diptych_policy.suspicion import (
    cleared,
    company_of,
    given_up,
    struck,
    suspected,
    with_setback,
)
from diptych_policy.unheard import UnheardCancels


class LiveRequests:
    """A table of requests that have not ended, at one moment of the judge's clock."""

    def __init__(self, fleet: Fleet, limits: Limits) -> None:
        self._fleet = fleet
        self._placer = Placer(fleet)
        self._limits = limits
        self._unheard = UnheardCancels()
        self._live: dict[RequestId, LiveRequest] = {}
        self._arrivals = 0
        self._now_s = 0.0
        self._unix_ms = 0
        self._may_place = False
        self._drains = {priority_class: DrainRate() for priority_class in PriorityClass}
        self._waiting_elsewhere: set[RequestId] = set()
        """Suspects of other schedulers that wait for workers."""

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    @property
    def queued(self) -> int:
        """Requests that wait for workers."""
        return sum(live.stage is Stage.QUEUED for live in self._live.values())

    @property
    def full(self) -> bool:
        """Whether no more requests should be pulled."""
        return self.queued >= self._limits.max_queued

    def class_queues(self) -> tuple[ClassQueue, ...]:
        """How many of each class wait for a first token, and how fast they get one."""
        waiting = Counter(
            live.request.priority_class
            for live in self._live.values()
            if not live.view.token_ids and live.stage is not Stage.ENDING
        )
        for priority_class, drain in self._drains.items():
            drain.tick(waiting=waiting[priority_class] > 0, now_s=self._now_s)
        return tuple(
            ClassQueue(priority_class=c, waiting=waiting[c], gap_s=round(drain.gap_s, 4))
            for c, drain in self._drains.items()
        )

    def current(self, request_id: RequestId, attempt: int) -> bool:
        """Whether `attempt` is still the one that counts, and is meant to run."""
        live = self._live.get(request_id)
        return live is not None and live.stage is Stage.ROUTED and live.record.attempt == attempt

    def recorded(self, request_id: RequestId) -> bool:
        """Whether it is live and its record stands."""
        live = self._live.get(request_id)
        return live is not None and live.stage is not Stage.CREATING

    def seq_of(self, request_id: RequestId) -> int:
        """Where a live request stands in the stream; 0: it is not live."""
        live = self._live.get(request_id)
        return live.record.request_seq if live is not None else 0

    def arrived_s(self, request_id: RequestId) -> float | None:
        """When a live request was taken on here, by the judge's clock."""
        live = self._live.get(request_id)
        return live.arrived_s if live is not None else None

    def gateways(self) -> set[Incarnation]:
        """Gateways whose journals carry live requests."""
        return {live.request.gateway for live in self._live.values()}

    def check(self) -> None:
        """Raise if an invariant is broken; tests call it after every event."""
        for request_id, live in self._live.items():
            broken = list(live.broken_invariants())
            if broken:
                raise AssertionError(f"{request_id} is {live.stage}: {'; '.join(broken)}")

    # Steps

    def _enter(self, request: Request, record: RequestRecord, stage: Stage) -> LiveRequest:
        self._arrivals += 1
        live = LiveRequest(
            request=request,
            record=record,
            view=RequestView(request.request_id, secret=request.secret),
            arrival=self._arrivals,
            stage=stage,
            since_s=self._now_s,
            arrived_s=self._now_s,
            progress_s=self._now_s,
            attendance=Attendance(orphan_grace_s(request, self._limits.resume_grace_s)),
        )
        self._live[request.request_id] = live
        return live

    def _found(self, member: Incarnation) -> list[Effect]:
        self._may_place = True
        for live in self._live.values():
            if live.request.gateway == member:  # it was only frozen, and knows its readers
                live.attendance.read()
        return [CancelWork(member, cancel) for cancel in self._unheard.take(member)]

    def _attended(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in self._live.keys() & set(request_ids):
            self._live[request_id].attendance.read_elsewhere(now_s=self._now_s)

    def _queue(self, live: LiveRequest) -> None:
        live.to(Stage.QUEUED, now_s=self._now_s)
        self._may_place = True

    def _release(self, live: LiveRequest, *, keep: Incarnation | None = None) -> None:
        if self._placer.release(live, keep=keep):
            self._may_place = True

    def _send(self, live: LiveRequest, assignment: Assignment) -> SendJob:
        job = live.job(assignment, unix_ms=self._unix_ms)
        record = live.record
        return SendJob(record.request_id, record.attempt, assignment.entry, job)

    def _lose(self, live: LiveRequest, why: str, *workers: Incarnation) -> list[Effect]:
        """`workers` have died or fallen silent with the attempt: the next one, or the end."""
        assignment = live.record.assignment
        apart = assignment is not None and assignment.apart and not live.shared
        self._note(live, why, *workers, lost=True, apart=apart)
        live.record = record = struck(
            live.record, self._limits, added_tokens=live.added_tokens, apart=apart
        )
        if given_up(record, self._limits):
            detail = f"{record.lost_attempts} attempts were lost, the last one: {why}"
            return self._end(live, EndReason.FAILED, detail, Cause.LOST_WORKERS)
        return self._retry(live)

    def _note(
        self,
        live: LiveRequest,
        why: str,
        *workers: Incarnation,
        lost: bool = False,
        apart: bool = False,
    ) -> None:
        """Remember why the attempt did not finish."""
        setback = Setback(
            attempt=live.record.attempt,
            why=why,
            workers=workers,
            lost=lost,
            apart=apart,
            unix_ms=self._unix_ms,
        )
        live.record = with_setback(live.record, setback)

    def _cleared(self, live: LiveRequest) -> list[Effect]:
        """Put a suspect that has got past what it was suspected for among the others again."""
        assignment = live.record.assignment
        if assignment is None or not cleared(
            live.record, self._limits, added_tokens=live.added_tokens
        ):
            return []
        assignment = msgspec.structs.replace(assignment, apart=False)
        live.record = msgspec.structs.replace(live.record, strikes=0, assignment=assignment)
        self._placer.keep(live, assignment)
        self._may_place = True
        return [SaveRecord(live.record)]

    def _retry(self, live: LiveRequest) -> list[Effect]:
        """Give the attempt up and announce the next one."""
        record = live.record
        cancels = self._cancel_work(live)
        self._release(live)
        live.decode_started = live.parked = False
        live.record = msgspec.structs.replace(
            record,
            state=RecordState.QUEUED,
            attempt=record.attempt + 1,
            assignment=None,
        )
        live.to(Stage.FENCING, now_s=self._now_s)
        return [
            SaveRecord(live.record),
            *cancels,
            PublishFence(record.gateway, live.fence()),
        ]

    def _cancel_work(self, live: LiveRequest) -> list[Effect]:
        record = live.record
        if record.assignment is None:
            return []
        effects: list[Effect] = []
        for worker in record.assignment.workers:
            if self._fleet.alive(worker):
                effects.append(CancelWork(worker, live.cancel()))
            elif self._fleet.registered(worker):
                self._unheard.note(worker, live.cancel())
        return effects

    def _end(
        self, live: LiveRequest, reason: EndReason, detail: str, cause: Cause | None = None
    ) -> list[Effect]:
        """Write the end to the record, then to the journal; closing waits for the journal."""
        if reason is EndReason.EXPIRED and suspected(live.record, self._limits):
            cause = Cause.LOST_WORKERS
        end = live.end_as(reason, detail, cause)
        cancels = self._cancel_work(live)
        self._release(live)
        live.end = end
        live.record = msgspec.structs.replace(live.record, state=RecordState.ENDING, end=end)
        live.to(Stage.ENDING, now_s=self._now_s)
        return [SaveRecord(live.record), *cancels, *self._tell_end(live, end)]

    def _tell_end(self, live: LiveRequest, end: End) -> list[Effect]:
        """Publish `end`, behind its attempt's fence if that has not been read back."""
        gateway = live.record.gateway
        unfenced = live.view.attempt < live.record.attempt
        fence: list[Effect] = [PublishFence(gateway, live.fence())] if unfenced else []
        return [*fence, PublishEnd(gateway, spoken(end, live.request.secret))]

    def _close(self, live: LiveRequest, end: End, end_seq: int) -> list[Effect]:
        self._forget(live)
        record = msgspec.structs.replace(live.record, journal_end_seq=end_seq)
        tokens = len(live.view.token_ids)
        if end.report is not None:
            context = live.request.prompt_tokens + live.view.attempt_start
            self._fleet.prefilled(end.report, context)
        return self._closed(record, end, request=live.request, tokens=tokens)

    def _closed(
        self, record: RequestRecord, end: End, *, request: Request | None, tokens: int = 0
    ) -> list[Effect]:
        """The last steps: a closed record means that nothing is left to do.

        What failed is buried, and only then erased; whoever finds it erased need not bury it.
        """
        effects: list[Effect] = []
        erased = request is None and end.cause not in (Cause.UNREADABLE, Cause.MISSING)
        if is_dead(record, end, self._limits) and not erased:
            effects = buried(record, end, request=request, tokens=tokens, unix_ms=self._unix_ms)
        request_id = record.request_id
        prompt = unneeded_prompt(request, end) if request is not None else ""
        ended = RequestEnded(
            request_id=request_id,
            end=end,
            tenant=record.tenant,
            prompt_tokens=record.prompt_tokens,
            answer_tokens=tokens,
        )
        return [
            *effects,
            Announce(request_id, ended, f"{request_id}.end", first=True),
            EraseRequest(request_id, record.request_seq, prompt),
            SaveRecord(msgspec.structs.replace(record, state=RecordState.CLOSED, end=end)),
        ]

    def _forget(self, live: LiveRequest) -> list[Effect]:
        self._release(live)
        del self._live[live.record.request_id]
        return []

    # Placing

    def _place(self) -> list[Effect]:
        """Place what is queued, if time, room or the queue has changed: not at every token."""
        if not self._may_place:
            return []
        self._may_place = False
        waiting = [e for e in self._live.values() if e.stage is Stage.QUEUED]
        waiting.sort(key=self._turn)
        effects: list[Effect] = []
        suspects = 0
        for live in waiting:
            if live.not_before_s > self._now_s:
                continue
            demand = self._demand(live)
            if demand.apart and self._yields(live.record.request_id):
                continue
            placed = self._try_to_place(live, demand)
            effects += placed
            if not placed and suspected(live.record, self._limits):
                suspects += demand.apart
                first = demand.apart and suspects == 1
                self._placer.keep_back(demand if first else None, live.record.request_id)
        return effects

    def _turn(self, live: LiveRequest) -> tuple[bool, tuple[int, int]]:
        """Suspects first: an idle worker is rare, and each needs it for some tokens only."""
        order = order_key(live.request.priority_class, live.arrival)
        return (not suspected(live.record, self._limits), order)

    def _demand(self, live: LiveRequest) -> Demand:
        live.excluded = {w: t for w, t in live.excluded.items() if t > self._now_s}
        waited_s = self._now_s - live.since_s
        company = company_of(live.record, self._limits, waited_s=waited_s)
        unproven = self._unproven() if company is Company.PROVEN else frozenset()
        return live.demand(company=company, unproven=unproven, rules=self._limits.paths)

    def _yields(self, request_id: RequestId) -> bool:
        """Whether another scheduler's suspect goes first: else both would take one idle worker."""
        return any(other < request_id for other in self._waiting_elsewhere)

    def _unproven(self) -> frozenset[Incarnation]:
        """Workers with requests that have brought next to nothing there."""
        return frozenset(
            worker
            for live in self._live.values()
            if live.added_tokens < self._limits.proof_tokens
            for worker in live.booked
        )

    def _try_to_place(self, live: LiveRequest, demand: Demand) -> list[Effect]:
        placement = self._placer.place(live, demand)
        if placement is None:
            return []
        live.record = msgspec.structs.replace(
            live.record, state=RecordState.ROUTED, assignment=placement
        )
        live.progress_s = self._now_s
        live.shared = False
        live.to(Stage.ROUTED, now_s=self._now_s)
        request_id, attempt = live.record.request_id, live.record.attempt
        routed = RequestRouted(request_id=request_id, attempt=attempt, assignment=placement)
        return [
            SaveRecord(live.record),
            self._send(live, placement),
            Announce(request_id, routed, f"{request_id}.routed.{attempt}"),
        ]

"""The live requests of one scheduler, and the steps that its rules (`recovery`) are made of."""

from collections.abc import Iterable

import msgspec

from diptych_contracts.events import RequestEnded
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import Assignment, RecordState, Request, RequestRecord
from diptych_policy.attendance import Attendance, grace_s
from diptych_policy.fleet import Fleet
from diptych_policy.journal import RequestView
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
from diptych_policy.orphans import unneeded_prompt
from diptych_policy.placing import Placer
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

    def current(self, request_id: RequestId, attempt: int) -> bool:
        """Whether `attempt` is still the one that counts, and is meant to run."""
        live = self._live.get(request_id)
        return live is not None and live.stage is Stage.ROUTED and live.record.attempt == attempt

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
            view=RequestView(request.request_id),
            arrival=self._arrivals,
            stage=stage,
            since_s=self._now_s,
            arrived_s=self._now_s,
            progress_s=self._now_s,
            attendance=Attendance(grace_s(request, self._limits.resume_grace_s)),
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

    def _retry(self, live: LiveRequest, why: str, *, lost: bool) -> list[Effect]:
        """Give the attempt up and announce the next one."""
        record = live.record
        lost_attempts = record.lost_attempts + lost
        if lost_attempts >= self._limits.max_lost_attempts:
            return self._end(
                live, EndReason.FAILED, f"{lost_attempts} attempts were lost, the last one: {why}"
            )
        cancels = self._cancel_work(live)
        self._release(live)
        live.decode_started = False
        live.record = msgspec.structs.replace(
            record,
            state=RecordState.QUEUED,
            attempt=record.attempt + 1,
            lost_attempts=lost_attempts,
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

    def _end(self, live: LiveRequest, reason: EndReason, detail: str) -> list[Effect]:
        """Write the end to the record, then to the journal; closing waits for the journal."""
        end = live.end_as(reason, detail)
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
        return [*fence, PublishEnd(gateway, end)]

    def _close(self, live: LiveRequest, end: End) -> list[Effect]:
        self._forget(live)
        return self._closing(live.record, end, live.request)

    def _closing(self, record: RequestRecord, end: End, request: Request | None) -> list[Effect]:
        """The last steps: a closed record means that nothing is left to do."""
        request_id = record.request_id
        prompt = unneeded_prompt(request, end) if request is not None else ""
        ended = RequestEnded(request_id=request_id, end=end)
        return [
            Announce(request_id, ended, f"{request_id}.end", first=True),
            EraseRequest(request_id, record.request_seq, prompt),
            SaveRecord(msgspec.structs.replace(record, state=RecordState.CLOSED, end=end)),
        ]

    def _forget(self, live: LiveRequest) -> list[Effect]:
        self._release(live)
        del self._live[live.record.request_id]
        return []

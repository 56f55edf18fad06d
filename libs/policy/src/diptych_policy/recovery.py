"""The request ledger: every accepted request ends exactly once.

States of a request here, and what moves it on:

    creating   record being created          → queued (RecordCreated) | forgotten (another's)
    queued     waits for workers             → routed (a placement)
    routed     workers have it               → fencing (lost, refused, silent) | ended (End)
    fencing    a new attempt is announced    → queued (its Fence read back from the journal)
    ending     cancel, expiry, failure       → ended (End read back from the journal)
    ended      record closed                 → gone

Rules:

- A new attempt is written to the record first, then fenced in the journal; only when the fence is
  read back are the tokens before it the prefix, and only then does a job go out.
- The first `End` of the newest attempt in the journal's order is the end, whoever wrote it.
- A refusal or a failed hand-off is not a lost attempt; the death or silence of a worker is. Five
  lost ones end the request: a poisonous one must not walk through the fleet (`suspicion`).
- A record is closed last: what failed is buried, the terminal event stored and the request erased
  before. Whoever adopts one that is still open does all of that again, with the same ids.
- Deadlines use `now_s`, the judge's clock, which stands still while the bus is away; the total
  deadline uses the bus's wall time, since schedulers' own clocks differ.
"""

from collections import deque

import msgspec

from diptych_contracts.dead import Cause
from diptych_contracts.events import RequestQueued
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import JobRefused, RefusalReason
from diptych_contracts.journal import AttemptFailed, End, EndReason, Started
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_policy.deadlines import (
    EndUnheard,
    Expire,
    FenceUnheard,
    GiveUpAttempt,
    Unread,
    Unrecorded,
    overdue,
)
from diptych_policy.fleet import Fleet
from diptych_policy.journal import FORGED, Change, JournalPart, RequestView, spoken
from diptych_policy.lifecycle import (
    AdoptionLost,
    Announce,
    AnswersAttended,
    CancelUnheard,
    CreateRecord,
    Denounce,
    Effect,
    Event,
    JobAnswered,
    Journalled,
    MemberWasFound,
    MemberWasLost,
    PublishEnd,
    PublishFence,
    RecordAdopted,
    RecordCreated,
    RecordGone,
    RecordSeen,
    RequestArrived,
    RequestUnreadable,
    SaveRecord,
    Ticked,
)
from diptych_policy.limits import Limits
from diptych_policy.live_request import LiveRequest, Stage
from diptych_policy.record_news import RecordNews


class Ledger(RecordNews):
    """All live requests of one scheduler. `handle` is the only way in."""

    def __init__(self, me: Incarnation, fleet: Fleet, limits: Limits | None = None) -> None:
        super().__init__(me, fleet, limits or Limits())
        self.log: deque[Event] = deque(maxlen=256)
        self.forged = 0
        """Parts of journals that were dropped for their voice."""

    def peers(self) -> set[Incarnation]:
        """Schedulers that own other live records, and gateways of these: watch them for absence."""
        return self._foreign.owners() | self.gateways()

    def handle(self, event: Event, *, now_s: float, unix_ms: int) -> list[Effect]:
        """What follows from `event`. `now_s` is the judge's clock, `unix_ms` the bus's."""
        self._now_s = now_s
        self._unix_ms = unix_ms
        self.log.append(event)
        match event:
            case RequestArrived() | RequestUnreadable():
                effects = self._pulled(event)
            case RecordCreated(request_id):
                effects = self._created(request_id)
            case RecordSeen() | AdoptionLost() | RecordGone():
                effects = self._heard_of_record(event)
            case RecordAdopted():
                effects = self._adopted(event)
            case Journalled():
                effects = self._journalled(event)
            case JobAnswered():
                effects = self._answered(event)
            case MemberWasLost() | MemberWasFound() | AnswersAttended() | CancelUnheard():
                effects = self._heard_of_members(event)
            case Ticked():
                self._may_place = True
                self._unheard.keep_registered(self._fleet)
                effects = [e for live in list(self._live.values()) for e in self._due(live)]
        return effects + self._place()

    def _pulled(self, event: RequestArrived | RequestUnreadable) -> list[Effect]:
        if isinstance(event, RequestUnreadable):
            return self._unreadable(event)
        request = event.request
        if request.request_id in self._live:
            return []
        record = RequestRecord(
            request_id=request.request_id,
            owner=self._me,
            gateway=request.gateway,
            state=RecordState.QUEUED,
            request_seq=event.request_seq,
            journal_seq=event.journal_seq,
            deadline_unix_ms=event.stored_unix_ms + round(request.deadlines.total_s * 1000),
            head=request.head,
            tenant=request.tenant,
            prompt_tokens=request.prompt_tokens,
            secret=request.secret,
        )
        live = self._enter(request, record, Stage.CREATING)
        if event.deliveries >= self._limits.max_deliveries:
            live.undeliverable = f"it was handed out {event.deliveries} times and never taken on"
        return [CreateRecord(record)]

    def _unreadable(self, event: RequestUnreadable) -> list[Effect]:
        """Nobody can run it: its record begins with its end."""
        end = End(
            request_id=event.request_id,
            attempt=1,
            reason=EndReason.FAILED,
            detail=event.detail,
            cause=Cause.UNREADABLE,
        )
        record = RequestRecord(
            request_id=event.request_id,
            owner=self._me,
            gateway=event.gateway,
            state=RecordState.ENDING,
            request_seq=event.request_seq,
            tenant="",
            end=end,
            secret=event.secret,
        )
        return [CreateRecord(record), *self._bury(record, end)]

    def _created(self, request_id: RequestId) -> list[Effect]:
        live = self._live.get(request_id)
        if live is None or live.stage is not Stage.CREATING:
            return []
        if live.undeliverable:
            return self._end(live, EndReason.FAILED, live.undeliverable, Cause.UNDELIVERABLE)
        self._queue(live)
        event = RequestQueued(request_id=request_id, scheduler=self._me)
        return [Announce(request_id, event, f"{request_id}.queued")]

    def _heard_of_members(
        self, event: MemberWasLost | MemberWasFound | AnswersAttended | CancelUnheard
    ) -> list[Effect]:
        match event:
            case MemberWasLost(member):
                return self._lost(member)
            case MemberWasFound(member):
                return self._found(member)
            case CancelUnheard(worker, cancel):
                self._unheard.note(worker, cancel)
            case AnswersAttended(request_ids):
                self._attended(request_ids)
        return []

    def _lost(self, member: Incarnation) -> list[Effect]:
        effects: list[Effect] = []
        for live in list(self._live.values()):
            if live.request.gateway == member:
                live.attendance.unread(now_s=self._now_s)
                effects += self._due(live)
            elif live.stage is Stage.ROUTED and live.needs(member):
                effects += self._lose(live, f"{member} is gone", member)
        return effects + self._foreign.take_from(member)

    def _adopted(self, event: RecordAdopted) -> list[Effect]:
        record, request = event.record, event.request
        self._forget_foreign(record.request_id)
        if record.request_id in self._live:
            return []
        if request is not None and not record.secret:  # an older scheduler wrote it
            record = msgspec.structs.replace(record, secret=request.secret)
        view = RequestView(record.request_id, secret=record.secret)
        for part in event.parts:
            view.apply(part)
        self.forged += view.forged
        if view.end is not None:
            record = msgspec.structs.replace(record, journal_end_seq=event.until_seq)
            return self._closed(record, view.end, request=request, tokens=len(view.token_ids))
        if request is None:
            end = record.end or End(
                request_id=record.request_id,
                attempt=record.attempt,
                reason=EndReason.FAILED,
                detail="the stored request is gone, or cannot be read",
                cause=Cause.MISSING,
            )
            return self._bury(record, end, tokens=len(view.token_ids))
        live = self._enter(request, record, Stage.CREATING)
        for part in event.parts:
            self._fold(live, part)
        if not event.whole and record.state in (RecordState.QUEUED, RecordState.ROUTED):
            detail = "the journal holds only a part of its answer"
            return self._end(live, EndReason.FAILED, detail, Cause.MISSING)
        tokens = len(live.view.token_ids)
        if tokens > record.adopted_tokens:
            live.record = msgspec.structs.replace(record, adoptions=0, adopted_tokens=tokens)
            return [SaveRecord(live.record), *self._continue(live)]
        if record.adoptions > self._limits.max_adoptions:
            detail = f"its last {record.adoptions} schedulers died without getting any further"
            return self._end(live, EndReason.FAILED, detail, Cause.LOST_SCHEDULERS)
        return self._continue(live)

    def _bury(self, record: RequestRecord, end: End, *, tokens: int = 0) -> list[Effect]:
        """Nobody can serve it: say so and close."""
        closed = self._closed(record, end, request=None, tokens=tokens)
        return [PublishEnd(record.gateway, spoken(end, record.secret)), *closed]

    def _continue(self, live: LiveRequest) -> list[Effect]:
        """Go on where the dead owner stopped."""
        record = live.record
        match record.state:
            case RecordState.CANCELLING:
                return self._end(live, EndReason.CANCELLED, record.cancel_reason)
            case RecordState.ENDING:
                end = record.end or live.end_as(EndReason.FAILED, "its scheduler died")
                return self._end(live, end.reason, end.detail)
        if live.view.attempt != record.attempt:
            live.to(Stage.FENCING, now_s=self._now_s)
            return [PublishFence(record.gateway, live.fence())]
        if record.state is RecordState.QUEUED or record.assignment is None:
            return self._refill(live)
        assignment = record.assignment
        gone = [w for w in assignment.workers if live.needs(w) and not self._fleet.alive(w)]
        if gone:
            return self._lose(live, f"{gone[0]} is gone", *gone)
        live.to(Stage.ROUTED, now_s=self._now_s)
        self._placer.book(live, assignment)
        if live.failed is not None and live.failed.attempt == record.attempt:
            return self._failed(live, live.failed)  # of which the owner may not have heard
        if live.view.attempt_has_tokens or live.decode_started:
            return []
        return [self._send(live, assignment)]

    # The journal

    def _journalled(self, event: Journalled) -> list[Effect]:
        live = self._live.get(event.part.request_id)
        if live is None or live.stage is Stage.CREATING:
            return []
        change = self._fold(live, event.part)
        if change is FORGED:
            return self._denounced(live, event.part)
        if live.view.attempt > live.record.attempt:  # the fence of another owner, of which the
            return self._forget(live)  # bucket has yet to tell: this one slept
        if change.new_ids and len(change.new_ids) == len(live.view.token_ids):
            self._drains[live.request.priority_class].served(now_s=self._now_s)
        if change.end is not None:
            return self._close(live, change.end, event.seq)
        if isinstance(event.part, AttemptFailed):
            return self._failed(live, event.part)
        if change.attempt == live.record.attempt and live.stage is Stage.FENCING:
            return self._refill(live)
        return self._cleared(live) if change.new_ids else []

    def _fold(self, live: LiveRequest, part: JournalPart) -> Change:
        """Take note of `part`."""
        change = live.view.apply(part)
        if isinstance(part, Started) and change is not FORGED:
            self._started(live, part)
        if isinstance(part, AttemptFailed) and change is not FORGED:
            live.failed = part
        if change.new_ids:
            live.progress_s = self._now_s
            live.failures = live.refusals = 0
        return change

    def _started(self, live: LiveRequest, started: Started) -> None:
        """A worker has begun; of an attempt without a fence yet nobody has a job."""
        if started.attempt != live.record.attempt or started.attempt != live.view.attempt:
            return
        if started.phase in ("decode", "parked"):
            live.decode_started = True
            live.parked = started.phase == "parked"
            self._seated(live, started)
        if live.decode_started:
            self._release(live, keep=started.worker)

    def _seated(self, live: LiveRequest, started: Started) -> None:
        """A decode worker has begun: its tokens are due from now on, and its parking is free."""
        if not live.parked and self._placer.seated(live, started.worker):
            live.progress_s = self._now_s
            self._may_place = True

    def _denounced(self, live: LiveRequest, part: JournalPart) -> list[Effect]:
        """Somebody spoke who had no right to: counted each time, told once."""
        self.forged += 1
        said = str(type(part).__struct_config__.tag).partition(".")[0]
        request_id = live.record.request_id
        return [Denounce(request_id, said, part.attempt)] if live.view.forged == 1 else []

    def _refill(self, live: LiveRequest) -> list[Effect]:
        """The fence is in the journal: the answer so far is the prefix of the new attempt."""
        if len(live.view.token_ids) >= live.request.stopping.max_tokens:
            return self._end(live, EndReason.LENGTH, "")
        self._queue(live)
        return []

    def _failed(self, live: LiveRequest, failed: AttemptFailed) -> list[Effect]:
        if live.stage is not Stage.ROUTED or failed.attempt != live.record.attempt:
            return []
        if not failed.retryable:
            self._note(live, f"{failed.reason}: {failed.detail}", failed.worker)
            detail = f"{failed.reason}: {failed.detail}"
            return self._end(live, EndReason.FAILED, detail, Cause.IMPOSSIBLE)
        return self._turned_down(live, failed.worker, failed.reason, failed.detail)

    def _answered(self, event: JobAnswered) -> list[Effect]:
        live = self._live.get(event.request_id)
        if live is None or not self.current(event.request_id, event.attempt):
            return []
        match event.answer:
            case None:
                return self._lose(live, f"{event.worker} does not answer", event.worker)
            case JobRefused(reason=RefusalReason.EXPIRED):
                return self._end(live, EndReason.EXPIRED, "the deadline passed")
            case JobRefused(reason=reason, detail=detail):
                return self._turned_down(live, event.worker, reason, detail)
        return []

    def _turned_down(
        self, live: LiveRequest, worker: Incarnation, reason: str, detail: str
    ) -> list[Effect]:
        """A live worker said no: try elsewhere, after a pause that grows."""
        no_room = reason in (RefusalReason.NO_ROOM, RefusalReason.DRAINING)
        if no_room:
            live.refusals += 1
        else:
            live.failures += 1
            self._note(live, f"{reason}: {detail}" if detail else reason, worker)
        if live.failures >= self._limits.max_failures:
            detail = f"{live.failures} workers in a row failed it, the last with: {reason}"
            return self._end(live, EndReason.FAILED, detail, Cause.FAILED_ATTEMPTS)
        doublings = min(live.refusals + live.failures, 8)
        pause_s = min(
            self._limits.first_back_off_s * 2 ** (doublings - 1), self._limits.max_back_off_s
        )
        live.not_before_s = self._now_s + (pause_s if no_room else 0.0)
        live.excluded[worker] = self._now_s + 2 * pause_s
        return self._retry(live)

    # Deadlines

    def _due(self, live: LiveRequest) -> list[Effect]:
        passed = overdue(
            live,
            now_s=self._now_s,
            unix_ms=self._unix_ms,
            end_again_s=self._limits.end_again_s,
        )
        match passed:
            case Expire(detail):
                return self._end(live, EndReason.EXPIRED, detail)
            case GiveUpAttempt(why):
                assignment = live.record.assignment
                silent = [w for w in assignment.workers if live.needs(w)] if assignment else []
                return self._lose(live, why, *silent)
            case Unread():
                gateway = live.request.gateway
                return self._end(live, EndReason.CANCELLED, f"{gateway} is gone")
            case EndUnheard():
                live.since_s = self._now_s
                end = live.end or live.end_as(EndReason.FAILED, "no end was published")
                return self._tell_end(live, end)
            case FenceUnheard():
                live.since_s = self._now_s
                return [PublishFence(live.record.gateway, live.fence())]
            case Unrecorded():
                live.unrecorded_s = None
                return [SaveRecord(live.record)]
            case None:
                return []

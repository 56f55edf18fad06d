"""What the bucket says of requests, this scheduler's and others'."""

import msgspec

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_policy.adoption import ForeignRecords
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import AdoptionLost, AdoptRecord, Effect, RecordGone, RecordSeen
from diptych_policy.limits import Limits
from diptych_policy.live_request import LiveRequest, Stage
from diptych_policy.live_requests import LiveRequests
from diptych_policy.suspicion import suspected


class RecordNews(LiveRequests):
    """The part of a ledger that hears of records.

    - A gateway may only mark one `cancelling` or `ending`: the mark is merged into what is known
      here, which may be an attempt further; attempts never go back.
    - Another scheduler's record is noted, and its request forgotten: this one slept.
    - A live request whose record is gone goes on, and its record is written again; only the journal
      says that it is over.
    - A swap that is lost to another adopter makes the record one of that other's.
    """

    def __init__(self, me: Incarnation, fleet: Fleet, limits: Limits) -> None:
        super().__init__(fleet, limits)
        self._me = me
        self._foreign = ForeignRecords(me)

    def _heard_of_record(self, event: RecordSeen | AdoptionLost | RecordGone) -> list[Effect]:
        match event:
            case RecordSeen(record, revision):
                return self._seen(record, revision)
            case AdoptionLost(record, revision):
                self._forget_foreign(record.request_id)
                return self._seen(record, revision)
            case RecordGone(request_id):
                self._forget_foreign(request_id)
                if (live := self._live.get(request_id)) is not None:
                    live.unrecorded_s = self._now_s
                return []

    def _seen(self, record: RequestRecord, revision: int) -> list[Effect]:
        live = self._live.get(record.request_id)
        if live is None:
            return self._seen_apart(record, revision)
        live.unrecorded_s = None
        if record.state is RecordState.CLOSED:
            return self._forget(live)
        unowned = record.request_seq == 0
        if record.owner != self._me and not unowned:
            forgotten = self._forget(live)
            self._note_foreign(record, revision)
            return forgotten
        if live.stage is not Stage.ENDING:
            return self._marked(live, record)
        return []

    def _marked(self, live: LiveRequest, record: RequestRecord) -> list[Effect]:
        match record.state:
            case RecordState.CANCELLING:
                reason = record.cancel_reason or "cancelled"
                live.record = msgspec.structs.replace(live.record, cancel_reason=reason)
                return self._end(live, EndReason.CANCELLED, reason)
            case RecordState.ENDING if record.end is not None:
                end = record.end
                if record.attempt != live.record.attempt:  # what it wrote into the journal is void
                    return self._end(live, end.reason, end.detail)
                cancels = self._cancel_work(live)
                self._release(live)
                live.record, live.end = record, end
                live.to(Stage.ENDING, now_s=self._now_s)
                return cancels
        return []

    def _seen_apart(self, record: RequestRecord, revision: int) -> list[Effect]:
        """The record of a request that is not live here."""
        mine = record.owner == self._me and record.state is not RecordState.CLOSED
        if mine and not self._foreign.adopting(record.request_id):
            # a gateway marked it while it was being closed: look into the journal and close it
            return [AdoptRecord(record, revision)]
        self._note_foreign(record, revision)
        return []

    def _note_foreign(self, record: RequestRecord, revision: int) -> None:
        """Another scheduler's request: where it runs apart, none of ours does."""
        self._foreign.note(record, revision)
        routed = record.assignment if record.state is RecordState.ROUTED else None
        workers = routed.workers if routed is not None and routed.apart else ()
        self._fleet.keep_for(record.request_id, workers)
        if record.state is RecordState.QUEUED and suspected(record, self._limits):
            self._waiting_elsewhere.add(record.request_id)
        else:
            self._waiting_elsewhere.discard(record.request_id)
        for live in self._live.values() if workers else ():
            live.shared = live.shared or not live.booked.keys().isdisjoint(workers)

    def _forget_foreign(self, request_id: RequestId) -> None:
        self._foreign.forget(request_id)
        self._fleet.keep_for(request_id, ())
        self._waiting_elsewhere.discard(request_id)

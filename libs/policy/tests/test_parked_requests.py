"""The ledger and parked answers: who is needed, what is due, what is booked."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec
import pytest

from diptych_contracts.fleet import ParkingRoom, Role
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import PrefillJob
from diptych_contracts.journal import Report, Started
from diptych_contracts.requests import KvPath
from diptych_policy.fleet import Fleet
from diptych_policy.journal import JournalPart
from diptych_policy.lifecycle import (
    Effect,
    Event,
    Journalled,
    MemberWasLost,
    PublishFence,
    RecordAdopted,
    RecordCreated,
    RequestArrived,
    SendJob,
    Ticked,
)
from diptych_policy.live_request import LiveRequest
from diptych_policy.recovery import Ledger
from diptych_testkit.builders import REQUEST, a_load, a_request, a_worker, an_end, tokens

P1, D1 = Incarnation("p1"), Incarnation("d1")
REQUESTED = a_request(prompt_ids=tuple(range(100)))
E = TypeVar("E")


class Case:
    """One prefill worker; `d1` is full and has room to park."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.ledger = Ledger(Incarnation("s1"), self.fleet)
        rooms = (ParkingRoom(kind="disk", total_bytes=10**6),)
        offer = msgspec.structs.replace(a_worker(D1), parking=rooms)
        for worker in (a_worker(P1, Role.PREFILL), offer):
            self.fleet.register(worker)
            self.fleet.found(worker.worker)
        self.fleet.report(a_load(D1, running=offer.max_sequences, parking=rooms))

    def tell(self, event: Event, now_s: float = 0.0) -> list[Effect]:
        effects = self.ledger.handle(event, now_s=now_s, unix_ms=round(now_s * 1000))
        self.ledger.check()
        return effects

    def hear(self, part: JournalPart, now_s: float = 0.0) -> list[Effect]:
        return self.tell(Journalled(part), now_s)

    def started(self, phase: str, now_s: float = 0.0) -> list[Effect]:
        return self.hear(Started(request_id=REQUEST, attempt=1, worker=D1, phase=phase), now_s)

    @property
    def live(self) -> LiveRequest:
        (live,) = self.ledger._live.values()
        return live

    @property
    def parking_free(self) -> int:
        (worker,) = (w for w in self.fleet.usable(REQUESTED.model, Role.DECODE))
        return worker.parking_places["disk"].free_bytes


def all_(kind: type[E], effects: Iterable[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


@pytest.fixture
def parked() -> Case:
    case = Case()
    case.tell(RequestArrived(REQUESTED, 7, 3, stored_unix_ms=0))
    (sent,) = all_(SendJob, case.tell(RecordCreated(RequestId(REQUEST))) + case.tell(Ticked()))
    assert isinstance(sent.job, PrefillJob)
    assert (sent.worker, sent.job.path) == (P1, KvPath.DIS_DISK)
    case.hear(tokens(1))
    case.started("parked")
    return case


def test_a_parked_answer_needs_its_prefill_worker_no_more(parked: Case) -> None:
    assert parked.live.booked.keys() == {D1}
    parked.fleet.lost(P1)
    assert not all_(PublishFence, parked.tell(MemberWasLost(P1)))
    parked.fleet.lost(D1)
    assert all_(PublishFence, parked.tell(MemberWasLost(D1)))
    assert not parked.live.parked


def test_no_token_is_due_while_an_answer_is_parked_and_one_is_after(parked: Case) -> None:
    inter_token_s = REQUESTED.deadlines.inter_token_s
    assert not all_(PublishFence, parked.tell(Ticked(), now_s=100 * inter_token_s))
    seated_s = 200 * inter_token_s
    parked.started("decode", seated_s)
    assert not all_(PublishFence, parked.tell(Ticked(), now_s=seated_s + inter_token_s - 0.1))
    assert all_(PublishFence, parked.tell(Ticked(), now_s=seated_s + inter_token_s))


def test_room_to_park_is_booked_until_there_is_a_seat(parked: Case) -> None:
    n_bytes = parked.fleet.kv_bytes(D1, 100)
    assert parked.parking_free == 10**6 - n_bytes
    parked.started("decode")
    assert parked.parking_free == 10**6
    parked.hear(an_end())
    assert parked.parking_free == 10**6
    (worker,) = parked.fleet.usable(REQUESTED.model, Role.DECODE)
    assert worker.assigned == 0


def test_whoever_adopts_it_knows_that_it_is_parked(parked: Case) -> None:
    record = parked.live.record
    parts = (tokens(1), Started(request_id=REQUEST, attempt=1, worker=D1, phase="parked"))
    other = Case()
    effects = other.tell(RecordAdopted(record, REQUESTED, parts))
    assert not all_(SendJob, effects)
    assert other.live.parked
    assert other.parking_free == 10**6 - other.fleet.kv_bytes(D1, 100)
    late_s = 10 * REQUESTED.deadlines.inter_token_s
    assert not all_(PublishFence, other.tell(Ticked(), now_s=late_s))


def test_what_prefill_takes_is_learnt_from_answers_that_end(parked: Case) -> None:
    report = Report(prefill_worker=P1, prefill_ms=200.0)
    parked.hear(msgspec.structs.replace(an_end(), report=report))
    (worker,) = parked.fleet.usable(REQUESTED.model, Role.PREFILL)
    assert worker.prefill_token_s == pytest.approx(0.002)
    parked.fleet.prefilled(Report(prefill_worker=P1, prefill_ms=100.0, cached_tokens=90), 100)
    assert worker.prefill_token_s == pytest.approx(0.002)
    parked.fleet.prefilled(Report(prefill_worker=P1, prefill_ms=700.0), 100)
    assert worker.prefill_token_s == pytest.approx(0.003)

"""The ledger and voices: with which it speaks, and which it hears."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec
import pytest

from diptych_contracts.dead import Cause
from diptych_contracts.events import RequestEnded
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState
from diptych_policy.fleet import Fleet
from diptych_policy.journal import JournalPart, spoken
from diptych_policy.lifecycle import (
    Announce,
    Bury,
    CreateRecord,
    Denounce,
    Effect,
    Event,
    Journalled,
    MemberWasLost,
    PublishEnd,
    PublishFence,
    RecordAdopted,
    RecordCreated,
    RequestArrived,
    RequestUnreadable,
    SaveRecord,
    SendJob,
    Ticked,
)
from diptych_policy.recovery import Ledger
from diptych_policy.voices import attempt_voice, owner_voice
from diptych_testkit.builders import GATEWAY, REQUEST, a_request, a_worker, an_end
from diptych_testkit.forgeries import forgeries

SECRET = bytes(range(16))
D1, D2 = Incarnation("d1"), Incarnation("d2")
E = TypeVar("E")


class Case:
    def __init__(self) -> None:
        self.fleet = Fleet()
        self.ledger = Ledger(Incarnation("s1"), self.fleet)
        for worker in (D1, D2):
            self.fleet.register(a_worker(worker, Role.DECODE))
            self.fleet.found(worker)

    def tell(self, event: Event) -> list[Effect]:
        effects = self.ledger.handle(event, now_s=0.0, unix_ms=0)
        self.ledger.check()
        return effects

    def hear(self, part: JournalPart) -> list[Effect]:
        return self.tell(Journalled(part))

    def lose(self, worker: Incarnation) -> list[Effect]:
        self.fleet.lost(worker)
        return self.tell(MemberWasLost(worker))


def all_(kind: type[E], effects: Iterable[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.fixture
def running(case: Case) -> Case:
    request = a_request(secret=SECRET)
    (create,) = all_(CreateRecord, case.tell(RequestArrived(request, 7, 3)))
    assert create.record.secret == SECRET
    (sent,) = all_(SendJob, case.tell(RecordCreated(REQUEST)) + case.tell(Ticked()))
    assert sent.job.generation.voice == attempt_voice(SECRET, 1)
    return case


def test_each_attempt_is_given_its_own_voice_and_its_fence_the_owners(running: Case) -> None:
    (worker,) = [e.booked for e in running.ledger._live.values()]
    (fence,) = all_(PublishFence, running.lose(next(iter(worker))))
    assert fence.fence.voice == owner_voice(SECRET)
    (sent,) = all_(SendJob, running.hear(fence.fence))
    assert sent.job.generation.voice == attempt_voice(SECRET, 2)


@pytest.mark.parametrize("voice", [b"", b"x" * 16, attempt_voice(SECRET, 2), owner_voice(b"no")])
def test_who_has_no_right_to_speak_changes_nothing_and_is_told_once(
    running: Case, voice: bytes
) -> None:
    effects = [e for part in forgeries(REQUEST, 1, voice) for e in running.hear(part)]
    assert effects == [Denounce(REQUEST, "token_entry", 1)]
    assert running.ledger.forged == 5
    (live,) = running.ledger._live.values()
    assert (live.record.attempt, live.record.state) == (1, RecordState.ROUTED)
    assert not live.decode_started


def test_an_end_is_said_with_the_owners_voice_and_kept_without(running: Case) -> None:
    (live,) = running.ledger._live.values()
    effects = running.ledger._end(live, EndReason.EXPIRED, "late")
    (said,), (saved,) = all_(PublishEnd, effects), all_(SaveRecord, effects)
    assert said.end.voice == owner_voice(SECRET)
    assert saved.record.end is not None
    assert saved.record.end.voice == b""
    closing = running.hear(said.end)
    (told,) = [a.event for a in all_(Announce, closing) if isinstance(a.event, RequestEnded)]
    assert told.end == saved.record.end


def test_a_workers_end_leaves_its_voice_in_the_journal(running: Case) -> None:
    end = spoken(an_end(), b"")
    voiced = msgspec.structs.replace(end, voice=attempt_voice(SECRET, 1))
    (saved,) = all_(SaveRecord, running.hear(voiced))
    assert saved.record.end == end
    assert saved.record.secret == SECRET  # a late reader needs it


def test_what_is_buried_has_no_secret(running: Case) -> None:
    (live,) = running.ledger._live.values()
    (said,) = all_(PublishEnd, running.ledger._end(live, EndReason.FAILED, "x", Cause.IMPOSSIBLE))
    (buried,) = all_(Bury, running.hear(said.end))
    assert buried.dead.request is not None
    assert buried.dead.request.secret == b""


def test_what_nobody_can_read_is_ended_with_the_voice_its_headers_give(case: Case) -> None:
    effects = case.tell(RequestUnreadable(REQUEST, GATEWAY, 7, "nonsense", SECRET))
    (said,), (create,) = all_(PublishEnd, effects), all_(CreateRecord, effects)
    assert said.end.voice == owner_voice(SECRET)
    assert create.record.secret == SECRET


def test_an_adopter_knows_the_secret_by_the_request_where_an_older_scheduler_left_it_out(
    running: Case, case: Case
) -> None:
    (live,) = running.ledger._live.values()
    record = msgspec.structs.replace(live.record, secret=b"")
    other = Case()
    forged = forgeries(REQUEST, 1, b"x" * 16)
    effects = other.tell(RecordAdopted(record, live.request, tuple(forged)))
    assert other.ledger.forged == len(forged)
    (adopted,) = other.ledger._live.values()
    assert adopted.record.secret == SECRET
    assert all(job.job.generation.voice for job in all_(SendJob, effects))

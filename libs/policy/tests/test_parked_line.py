"""The line of parked jobs before an engine: bounded, in order, and nobody overtakes it."""

from random import Random

import pytest

from diptych_contracts.ids import RequestId
from diptych_contracts.jobs import RefusalReason
from diptych_policy.job_admission import Admitted, JobAdmission, NotAdmitted

R1, R2, R3 = (RequestId(f"r{n}") for n in (1, 2, 3))


@pytest.fixture
def admission() -> JobAdmission:
    return JobAdmission(max_sequences=1, kv_tokens=100, max_parked=2)


def test_whoever_parks_needs_no_seat_and_gets_one_in_order(admission: JobAdmission) -> None:
    assert admission.admit(R1, 1, 60, may_wait=False) == Admitted()
    assert admission.park(R2, 1, 60) == Admitted()
    assert admission.park(R2, 1, 60) == Admitted(duplicate=True)
    assert admission.park(R3, 1, 10) == Admitted()
    admission.line_up(R3, 1)
    admission.line_up(R2, 1)
    assert (len(admission), admission.parked, admission.line) == (3, 2, 2)
    assert admission.seat_next() is None
    admission.leave(R1, 1)
    assert admission.seat_next() == (R3, 1)
    assert admission.seat_next() is None
    assert admission.parks(R2, 1)
    assert not admission.parks(R3, 1)
    admission.check()


def test_a_parked_job_whose_kv_is_not_there_yet_is_not_seated(admission: JobAdmission) -> None:
    admission.park(R1, 1, 10)
    assert admission.seat_next() is None
    assert admission.admit(R2, 1, 10, may_wait=False) == Admitted()


def test_nobody_overtakes_the_line(admission: JobAdmission) -> None:
    admission.park(R1, 1, 10)
    admission.line_up(R1, 1)
    refused = NotAdmitted(RefusalReason.NO_ROOM, "1 parked jobs go first")
    assert admission.admit(R2, 1, 10, may_wait=False) == refused
    assert admission.seat_next() == (R1, 1)


def test_parking_is_bounded_and_what_never_fits_is_refused(admission: JobAdmission) -> None:
    never = admission.park(R1, 1, 101)
    assert isinstance(never, NotAdmitted)
    assert never.reason is RefusalReason.NO_ROOM
    admission.park(R1, 1, 10)
    admission.park(R2, 1, 10)
    full = admission.park(R3, 1, 10)
    assert full == NotAdmitted(RefusalReason.NO_ROOM, "2 jobs park already")


def test_cancels_and_newer_attempts_find_what_is_parked(admission: JobAdmission) -> None:
    admission.park(R1, 1, 10)
    assert admission.park(R1, 2, 10) == Admitted(stale=(1,))
    assert admission.cancel(R1, 2) == (1, 2)
    assert admission.park(R1, 2, 10) == Admitted(duplicate=True)
    admission.leave(R1, 1)
    admission.leave(R1, 2)
    assert admission.past(R1, 2)
    assert not len(admission)
    assert admission.park(R2, 1, 10) == Admitted()
    admission.cancel(R3, 1)
    assert admission.park(R3, 1, 10) == NotAdmitted(RefusalReason.CANCELLED)


def test_a_drain_takes_nobody_in_and_still_seats_the_line(admission: JobAdmission) -> None:
    admission.park(R1, 1, 10)
    admission.line_up(R1, 1)
    admission.draining = True
    assert admission.park(R2, 1, 10) == NotAdmitted(RefusalReason.DRAINING)
    assert admission.seat_next() == (R1, 1)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_the_line_moves_in_order_and_never_overfills(  # noqa: C901 - one model
    seed: int,
) -> None:
    rng = Random(seed)
    seats, cells = rng.randint(1, 4), rng.randint(20, 100)
    admission = JobAdmission(max_sequences=seats, kv_tokens=cells, max_parked=6)
    seated: dict[tuple[RequestId, int], int] = {}
    asked: dict[tuple[RequestId, int], int] = {}
    line: list[tuple[RequestId, int]] = []
    for n in range(200):
        key = (RequestId(f"r{n}"), 1)
        tokens = rng.randint(1, cells)
        match rng.choice(["admit", "park", "line", "leave", "unseat", "cancel", "seat"]):
            case "admit":
                if admission.admit(*key, tokens, may_wait=False) == Admitted():
                    assert not line
                    seated[key] = tokens
            case "park":
                if admission.park(*key, tokens) == Admitted():
                    asked[key] = tokens
            case "line" if asked:
                key = rng.choice(list(asked))
                admission.line_up(*key)
                if key not in line:
                    line.append(key)
            case "seat":
                found = admission.seat_next()
                if found is None:
                    full = len(seated) == seats
                    free = cells - sum(seated.values())
                    assert not line or full or asked[line[0]] > free
                else:
                    assert found == line.pop(0)
                    seated[found] = asked.pop(found)
            case "leave" | "unseat" | "cancel" as end if seated or asked:
                key = rng.choice([*seated, *asked])
                if end == "cancel":
                    assert admission.cancel(*key) == (1,)
                (admission.unseat if end == "unseat" else admission.leave)(*key)
                seated.pop(key, None)
                asked.pop(key, None)
                line = [other for other in line if other != key]
        admission.check()
        assert set(admission) == {*seated, *asked}
        assert admission.promised_tokens == sum(seated.values()) <= cells
        assert len(seated) <= seats
        assert admission.line == len(line)

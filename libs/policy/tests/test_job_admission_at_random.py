"""Jobs, cancels and leavings in any order, twice or late: what a worker's seats promise."""

from random import Random

import pytest

from diptych_contracts.ids import RequestId
from diptych_policy.job_admission import Admitted, JobAdmission, NotAdmitted


class Seats:
    """A `JobAdmission` and what must be true of it."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.admission = JobAdmission(max_sequences=3, kv_tokens=100, max_waiting=5)
        self.running: dict[tuple[RequestId, int], int] = {}
        self.ran: set[tuple[RequestId, int]] = set()
        self.cancelled: dict[RequestId, int] = {}

    def step(self) -> None:
        request_id, attempt = key = (
            RequestId(f"r{self.rng.randrange(4)}"),
            self.rng.randint(1, 4),
        )
        match self.rng.randrange(6):
            case 0 | 1 | 2:
                self._admit(key)
            case 3:
                self._leave(key)
            case 4:
                stopped = self.admission.cancel(request_id, attempt)
                self.cancelled[request_id] = max(attempt, self.cancelled.get(request_id, 0))
                assert set(stopped) == {
                    a for r, a in self.running if r == request_id and a <= attempt
                }
                for older in stopped:
                    self._leave((request_id, older))
            case 5 if self.rng.random() < 0.1:
                self.admission.unseat(*key)
                self.running.pop(key, None)
        self._check()

    def _admit(self, key: tuple[RequestId, int]) -> None:
        tokens, may_wait = self.rng.randint(1, 60), self.rng.random() < 0.5
        before = set(self.running)
        answer = self.admission.admit(*key, tokens, may_wait=may_wait)
        known = key in before or key in self.ran
        match answer:
            case Admitted(duplicate=True):
                assert known, f"{key} is no duplicate"
            case Admitted(stale=stale):
                assert not known, f"{key} runs twice"
                assert key[1] > self.cancelled.get(key[0], 0), f"{key} was cancelled"
                assert set(stale) == {a for r, a in before if r == key[0] and a < key[1]}
                self.running[key] = tokens
            case NotAdmitted():
                assert not known, f"{key} is here already"

    def _leave(self, key: tuple[RequestId, int]) -> None:
        self.admission.leave(*key)
        if self.running.pop(key, None) is not None:
            self.ran.add(key)

    def _check(self) -> None:
        self.admission.check()
        assert set(self.admission) == set(self.running)
        assert self.admission.promised_tokens == sum(self.running.values())
        assert len(self.admission) <= 5


@pytest.mark.parametrize("seed", range(40))
def test_no_attempt_runs_twice_or_after_its_cancel(seed: int) -> None:
    seats = Seats(seed)
    for _ in range(300):
        seats.step()
    for key in list(seats.running):
        seats.admission.leave(*key)
    assert (len(seats.admission), seats.admission.promised_tokens) == (0, 0)

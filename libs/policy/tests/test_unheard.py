from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import Cancel
from diptych_policy.fleet import Fleet
from diptych_policy.unheard import UnheardCancels
from diptych_testkit.builders import REQUEST, a_worker

D1, D2 = Incarnation("d1"), Incarnation("d2")


def cancel(attempt: int, request_id: str = REQUEST) -> Cancel:
    return Cancel(request_id=RequestId(request_id), attempt=attempt)


def test_a_worker_is_told_the_newest_attempt_of_each_request() -> None:
    unheard = UnheardCancels()
    for attempt in (1, 3, 2):
        unheard.note(D1, cancel(attempt))
    unheard.note(D1, cancel(1, "r2"))
    unheard.note(D2, cancel(1))
    assert unheard.take(D1) == [cancel(3), cancel(1, "r2")]
    assert unheard.take(D1) == []
    assert len(unheard) == 1


def test_workers_that_are_not_coming_back_are_forgotten() -> None:
    unheard, fleet = UnheardCancels(), Fleet()
    fleet.register(a_worker(D1))
    for worker in (D1, D2):
        unheard.note(worker, cancel(1))
    unheard.keep_registered(fleet)
    assert (unheard.take(D2), unheard.take(D1)) == ([], [cancel(1)])


def test_its_memory_is_bounded() -> None:
    unheard = UnheardCancels()
    for number in range(5000):
        unheard.note(D1, cancel(1, f"r{number}"))
    assert len(unheard) == 4096
    assert cancel(1, "r4999") in unheard.take(D1)

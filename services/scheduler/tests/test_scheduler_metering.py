from functools import partial
from typing import Any

from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import GenerateJob, JobAccepted, JobRefused, PrefillJob, RefusalReason
from diptych_contracts.journal import Fence
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import JobAnswered, PublishFence, RequestArrived, SendJob
from diptych_policy.recovery import Ledger
from diptych_scheduler.metering import Metering
from diptych_telemetry.metrics import REGISTRY
from diptych_testkit.builders import GATEWAY, REQUEST, a_generation, a_request, a_worker

ME, WORKER = Incarnation("s1-1"), Incarnation("d1-1")


def seen(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"diptych_scheduler_{name}", labels) or 0.0


def grown(act: Any, name: str, **labels: str) -> float:
    before = seen(name, **labels)
    act()
    return seen(name, **labels) - before


def test_jobs_fences_and_refusals_are_counted() -> None:
    metering = Metering()
    local = GenerateJob(generation=a_generation())
    remote = PrefillJob(generation=a_generation(), decode_worker=WORKER, link="shm")
    jobs = [SendJob(REQUEST, 1, WORKER, job) for job in (local, remote, remote)]
    assert grown(lambda: metering.ordered(jobs), "routed_total", mode="remote") == 2
    fence = PublishFence(GATEWAY, Fence(request_id=REQUEST, attempt=2))
    assert grown(lambda: metering.ordered([fence]), "fences_total") == 1
    refused = JobRefused(request_id=REQUEST, attempt=1, reason=RefusalReason.NO_ROOM)
    answered = JobAnswered(REQUEST, 1, WORKER, refused)
    ledger = Ledger(ME, Fleet())
    heard = partial(metering.heard, answered, ledger, now_s=1.0)
    assert grown(heard, "refused_total", reason="no_room") == 1


def test_the_time_from_arrival_to_a_workers_yes_is_told_once() -> None:
    metering, ledger = Metering(), Ledger(ME, Fleet())
    ledger.handle(RequestArrived(a_request(), 1, 0), now_s=10.0, unix_ms=0)

    def said(attempt: int = 1, *, duplicate: bool = False) -> tuple[float, float]:
        yes = JobAccepted(request_id=REQUEST, attempt=attempt, duplicate=duplicate)
        event = JobAnswered(REQUEST, attempt, WORKER, yes)
        before = seen("route_duration_seconds_sum")
        hear = partial(metering.heard, event, ledger, now_s=10.25)
        count = grown(hear, "route_duration_seconds_count")
        return count, seen("route_duration_seconds_sum") - before

    assert said() == (1, 0.25)
    assert said(duplicate=True) == (0, 0), "accepted before, by what another scheduler sent"
    assert said(attempt=2) == (0, 0), "its first attempt ran meanwhile"


def test_members_that_are_lost_and_return_count() -> None:
    metering = Metering()
    assert grown(metering.lost, "members_lost_total") == 1
    assert grown(lambda: metering.found(returned=False), "members_returned_total") == 0
    assert grown(lambda: metering.found(returned=True), "members_returned_total") == 1


def test_workers_count_while_they_beat() -> None:
    metering, fleet = Metering(), Fleet()
    fleet.register(a_worker("d1"))
    fleet.register(a_worker("p1", Role.PREFILL))
    fleet.found(Incarnation("d1"))
    metering.now(Ledger(ME, fleet), fleet)
    assert (seen("workers", role="decode"), seen("workers", role="prefill")) == (1, 0)
    assert (seen("owned_requests"), seen("queued_requests")) == (0, 0)

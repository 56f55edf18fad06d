"""A worker that thaws finds in one moment what was said to it in many."""

import asyncio

import pytest

from diptych_contracts import subjects
from diptych_contracts.fleet import Role
from diptych_contracts.jobs import (
    Cancel,
    CancelDone,
    GenerateJob,
    JobAccepted,
    JobAnswer,
    PrefillJob,
)
from diptych_testkit.builders import REQUEST, a_generation
from diptych_testkit.small_fleet import small_fleet

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("kind", ["prefill", "generate"])
async def test_a_job_and_its_cancel_leave_nothing_behind(kind: str) -> None:
    """The task of the job was cancelled before its first turn, and its seat stayed taken."""
    async with small_fleet() as fleet:
        fleet.worker("w1", Role.PREFILL)
        await fleet.ready()
        me = fleet.incarnation("w1")
        generation = a_generation(REQUEST)
        job: PrefillJob | GenerateJob = GenerateJob(generation=generation)
        if kind == "prefill":
            job = PrefillJob(generation=generation, decode_worker=me, link="shm")
        fleet.freeze("w1")
        asked = asyncio.gather(
            fleet.bus.request(subjects.job(me), job, JobAnswer, timeout_s=5),
            fleet.bus.request(
                subjects.cancel(me), Cancel(request_id=REQUEST, attempt=1), CancelDone, timeout_s=5
            ),
        )
        await asyncio.sleep(1)
        fleet.thaw("w1")
        answered, done = await asked
        assert answered == JobAccepted(request_id=REQUEST, attempt=1)
        assert done == CancelDone(request_id=REQUEST, attempt=1)
        await fleet.settled(timeout_s=2)

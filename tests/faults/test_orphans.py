"""What becomes of requests whose gateway is dead: the scheduler decides, by their intent."""

import asyncio

import pytest

from diptych_contracts import subjects
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RequestRecord
from diptych_contracts.responses import Attended
from diptych_contracts.sampling import Stopping
from diptych_policy.journal import RequestView, parts
from diptych_testkit.builders import GATEWAY, a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

pytestmark = pytest.mark.virtual_time
PROMPT = tuple(range(1, 101))
OTHER = Incarnation("gateway-2")
RID = RequestId("r1")


def slow_engine(step_s: float = 0.005) -> ToyStepEngine:
    return ToyStepEngine(step_s=step_s)


async def orphaned(
    fleet: SmallFleet, *, tokens: int, grace_s: float = 30.0, **intent: bool
) -> None:
    """A request that decodes, and whose gateway has just died."""
    fleet.scheduler(resume_grace_s=grace_s)
    fleet.worker("p1", Role.PREFILL, engine=slow_engine())
    fleet.worker("d1", Role.DECODE, engine=slow_engine())
    await fleet.ready()
    request = a_request(RID, prompt_ids=PROMPT, stopping=Stopping(max_tokens=tokens), **intent)
    await fleet.client.send(request)
    await fleet.client.has_tokens(RID, 5)
    await fleet.client.close()


async def outcome(fleet: SmallFleet) -> tuple[RequestRecord, list[int]]:
    """The closed record, and the answer as any gateway would read it."""
    record = await fleet.closed(RID, timeout_s=30.0)
    view = RequestView(RID)
    async for item in fleet.bus.read(GATEWAY, after_seq=record.journal_seq):
        for part in parts(item.entry):
            view.apply(part)
    assert view.end == record.end
    await fleet.settled()
    return record, view.token_ids


async def test_without_intent_a_dead_gateways_request_is_cancelled_soon() -> None:
    async with small_fleet() as fleet:
        await orphaned(fleet, tokens=1800)
        record, ids = await outcome(fleet)
        assert record.end is not None
        assert record.end.reason is EndReason.CANCELLED
        assert len(ids) < 1800


@pytest.mark.parametrize("intent", ["resume", "background"])
async def test_with_intent_it_goes_on_and_any_gateway_can_read_it(intent: str) -> None:
    async with small_fleet() as fleet:
        await orphaned(fleet, tokens=600, **{intent: True})
        record, ids = await outcome(fleet)
        assert record.end is not None
        assert record.end.reason is EndReason.LENGTH
        assert ids == toy_answer(PROMPT, 600)


async def test_an_orphan_nobody_reads_is_cancelled_after_its_grace() -> None:
    async with small_fleet() as fleet:
        await orphaned(fleet, tokens=1800, grace_s=0.5, resume=True)
        record, ids = await outcome(fleet)
        assert record.end is not None
        assert record.end.reason is EndReason.CANCELLED
        assert ids == toy_answer(PROMPT, len(ids))


async def test_an_orphan_that_is_read_elsewhere_runs_to_its_end() -> None:
    async with small_fleet() as fleet:
        await orphaned(fleet, tokens=700, grace_s=0.5, resume=True)
        message = Attended(reader=OTHER, request_ids=(RID,))

        async def attend() -> None:
            while True:
                await fleet.bus.publish(subjects.attended(GATEWAY), message)
                await asyncio.sleep(0.1)

        attending = asyncio.create_task(attend())
        record, ids = await outcome(fleet)
        attending.cancel()
        assert record.end is not None
        assert record.end.reason is EndReason.LENGTH
        assert ids == toy_answer(PROMPT, 700)


async def test_the_grace_survives_the_schedulers_death() -> None:
    async with small_fleet() as fleet:
        await orphaned(fleet, tokens=700, resume=True)
        await fleet.kill("s1")
        fleet.scheduler("s2", resume_grace_s=30.0)
        record, ids = await outcome(fleet)
        assert (record.owner, ids) == (fleet.incarnation("s2"), toy_answer(PROMPT, 700))

"""A scheduler stops between two of its steps; another goes on. One test per crash point.

`docs/testing.md` names the row of each. All end with `is_over`: one end, told once; nothing held;
the record closed last, its request erased.
"""

import asyncio

import pytest

from diptych_contracts import subjects
from diptych_contracts.fleet import Beat, Role
from diptych_contracts.jobs import GenerateJob, JobAccepted, PrefillJob
from diptych_contracts.journal import End, EndReason, Fence
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_testkit.aftermath import dead_letters, journal_of, nothing_is_left
from diptych_testkit.builders import GATEWAY, REQUEST
from diptych_testkit.cut_fleet import (
    LONG,
    PROMPT,
    SHORT,
    acknowledges,
    creates_record,
    cut_fleet,
    sends_prefill,
    tells_the_end,
    writes,
)
from diptych_testkit.interruptions import Call
from diptych_testkit.toy_engine import toy_answer

pytestmark = pytest.mark.virtual_time
FROZEN_S = 1.6
"""Longer than the silence after which a member counts as dead."""


async def test_pulled_but_no_record_created() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_before("s1", creates_record)
        await case.start("s1")
        await case.ask()
        await case.dies(cut)
        await case.join("s2")
        record = await case.is_answered()
        assert record.owner == case.fleet.incarnation("s2")
        assert (record.attempt, record.adoptions) == (1, 0)


async def test_record_created_but_not_acknowledged_and_the_owner_dies() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_before("s1", acknowledges)
        await case.start("s1")
        await case.join("s2")
        again = case.broker.note("s2", acknowledges)
        await case.ask(LONG)
        await case.dies(cut)
        record = await case.is_answered(LONG)
        assert record.owner == case.fleet.incarnation("s2")
        assert (record.attempt, record.lost_attempts) == (1, 0)
        assert again.reached.is_set()


async def test_a_mark_found_and_acknowledged_but_no_end_written() -> None:
    """Nobody adopted the gateway's mark: its request stayed in the stream."""
    async with cut_fleet() as case:
        mark = RequestRecord(
            request_id=REQUEST,
            owner=GATEWAY,
            gateway=GATEWAY,
            state=RecordState.CANCELLING,
            cancel_reason="not accepted in time",
        )
        await case.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).create(REQUEST, mark)
        cut = case.broker.kill_before("s1", writes(RecordState.ENDING))
        await case.start("s1")
        await case.ask()
        await case.dies(cut)
        await case.join("s2")
        end = await case.fleet.client.ended(REQUEST)
        assert (end.reason, end.detail) == (EndReason.CANCELLED, "not accepted in time")
        record = await case.is_over()
        assert (record.owner, record.adoptions) == (case.fleet.incarnation("s2"), 1)


@pytest.mark.parametrize("peers", [(), ("s2",)])
async def test_record_created_but_not_acknowledged_and_the_owner_lives(
    peers: tuple[str, ...],
) -> None:
    """Delivered again, it is acknowledged: it once came five times and was buried as dead."""
    async with cut_fleet() as case:
        lost = case.broker.lose("s1", acknowledges)
        await case.start("s1")
        again = [case.broker.note(name, acknowledges) for name in ("s1", *peers)]
        await case.ask(LONG + 600)
        for name in peers:
            await case.join(name)
        assert (await case.is_answered(LONG + 600)).owner == case.fleet.incarnation("s1")
        assert lost.reached.is_set()
        assert any(cut.reached.is_set() for cut in again)
        assert dead_letters(case.fleet) == []


async def test_assignment_written_but_no_job_sent() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_before("s1", sends_prefill)
        sent = case.broker.note("s2", sends_prefill)
        await case.start("s1")
        await case.join("s2")
        await case.ask()
        await case.dies(cut)
        assert (await case.record()).state is RecordState.ROUTED
        record = await case.is_answered()
        assert (record.owner, record.attempt) == (case.fleet.incarnation("s2"), 1)
        assert sent.call is not None
        assert cut.call is not None
        assert sent.call.subject == cut.call.subject


async def test_job_sent_but_its_answer_not_heard() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_after("s1", sends_prefill)
        accepted = case.broker.note("p1", lambda call: call.is_a(JobAccepted))
        await case.start("s1")
        await case.join("s2")
        await case.ask(LONG)
        await case.dies(cut)
        record = await case.is_answered(LONG)
        assert (record.owner, record.attempt) == (case.fleet.incarnation("s2"), 1)
        assert accepted.reached.is_set()


async def test_a_worker_that_dies_with_the_scheduler_that_has_just_assigned_it() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_before("s1", sends_prefill)
        await case.start("s1", decodes=2)
        await case.join("s2")
        await case.ask()
        await case.dies(cut)
        assignment = (await case.record()).assignment
        assert assignment is not None
        await case.fleet.kill(assignment.decode.partition("-")[0])
        record = await case.is_answered()
        assert (record.attempt, record.lost_attempts) == (2, 1)


async def test_attempt_raised_but_no_fence_published() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_before("s1", lambda call: call.is_a(Fence))
        await case.start("s1", decodes=2)
        await case.join("s2")
        await case.ask(LONG)
        await case.fleet.client.has_tokens(REQUEST, 20)
        assignment = (await case.record()).assignment
        assert assignment is not None
        await case.fleet.kill(assignment.decode.partition("-")[0])
        await case.dies(cut)
        record = await case.is_answered(LONG)
        assert (record.owner, record.attempt) == (case.fleet.incarnation("s2"), 2)
        fences = [part for part in journal_of(case.fleet, REQUEST) if isinstance(part, Fence)]
        assert [fence.attempt for fence in fences] == [2]


async def test_fence_published_but_no_job_sent() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_after("s1", lambda call: call.is_a(Fence))
        await case.start("s1", decodes=2)
        await case.join("s2")
        await case.ask(LONG)
        await case.fleet.client.has_tokens(REQUEST, 20)
        assignment = (await case.record()).assignment
        assert assignment is not None
        await case.fleet.kill(assignment.decode.partition("-")[0])
        await case.dies(cut)
        record = await case.is_answered(LONG)
        assert (record.owner, record.attempt) == (case.fleet.incarnation("s2"), 2)


async def test_two_schedulers_adopt_and_the_loser_may_adopt_later() -> None:
    names = [f"r{number}" for number in range(8)]
    async with cut_fleet() as case:
        await case.start("s1")
        await case.join("s2")
        await case.join("s3")
        heirs = {case.fleet.incarnation(name): name for name in ("s2", "s3")}
        for name in names:
            await case.ask(LONG, name)
        for name in names:
            await case.fleet.client.has_tokens(name, 5)
        for name in names:  # all of one owner, so that both others want them
            owner = case.fleet.incarnation("s1")
            if (await case.record(name)).owner != owner:
                await case.mark(name, owner=owner)
        await case.fleet.kill("s1")
        owners = await adopted(case, names, set(heirs))
        await case.fleet.kill(heirs.pop(owners.pop()))
        await adopted(case, names, set(heirs))
        for name in names:
            record = await case.is_answered(LONG, name)
            assert (record.owner in heirs, record.attempt) == (True, 1)


async def adopted(case: object, names: list[str], heirs: set[str]) -> set[str]:
    """Who owns the records, once they are all owned by one of `heirs`."""
    async with asyncio.timeout(60):
        while True:
            owners = {(await case.record(name)).owner for name in names}  # type: ignore[attr-defined]
            if owners <= heirs:
                return owners
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(sends_prefill, id="job"),
        pytest.param(creates_record, id="create"),
        pytest.param(writes(RecordState.ROUTED), id="routed"),
        pytest.param(tells_the_end, id="end-told"),
        pytest.param(writes(RecordState.CLOSED), id="closed"),
    ],
)
async def test_a_frozen_scheduler_wakes_with_stale_memory(where: object) -> None:
    async with cut_fleet() as case:
        cut = case.broker.freeze_before("s1", where)  # type: ignore[arg-type]
        await case.start("s1")
        await case.ask()
        await cut.reached.wait()
        await case.join("s2")
        await asyncio.sleep(FROZEN_S)
        record = await case.is_answered()
        assert (record.owner, record.attempt) == (case.fleet.incarnation("s2"), 1)
        case.fleet.thaw("s1")
        await asyncio.sleep(0.3)
        assert await case.is_over() == record
        await case.fleet.kill("s2")
        await case.ask(request_id="r2")
        again = await case.is_answered(request_id="r2")
        assert again.owner == case.fleet.incarnation("s1")


@pytest.mark.parametrize("step", ["record", "fence"])
async def test_a_frozen_scheduler_wakes_in_the_middle_of_a_recovery(step: str) -> None:
    def place(call: Call) -> bool:
        if step == "fence":
            return call.is_a(Fence)
        return writes(RecordState.QUEUED, attempt=2)(call)

    async with cut_fleet() as case:
        cut = case.broker.freeze_before("s1", place)
        await case.start("s1", decodes=3)
        await case.join("s2")
        await case.ask(LONG)
        await case.fleet.client.has_tokens(REQUEST, 20)
        await case.fleet.kill(await decoding(case))
        await cut.reached.wait()
        async with asyncio.timeout(60):
            while (await case.record()).owner != case.fleet.incarnation("s2"):
                await asyncio.sleep(0.02)
        await case.fleet.client.until(lambda: case.fleet.client.views[REQUEST].attempt == 2)
        await case.fleet.kill(await decoding(case))
        await case.fleet.client.until(lambda: case.fleet.client.views[REQUEST].attempt == 3)
        case.fleet.thaw("s1")
        record = await case.is_answered(LONG)
        assert (record.owner, record.attempt) == (case.fleet.incarnation("s2"), 3)


async def decoding(case: object) -> str:
    """The name of the decode worker that the record names."""
    async with asyncio.timeout(60):
        while True:
            record = await case.record()  # type: ignore[attr-defined]
            if record.assignment is not None:
                return str(record.assignment.decode.partition("-")[0])
            await asyncio.sleep(0.01)


async def test_a_record_moves_on_while_it_is_adopted() -> None:
    """Its owner was only frozen: it ends the request between the adopter's look and its swap."""
    async with cut_fleet() as case:
        await case.start("s1")
        await case.ask(LONG)
        await case.fleet.client.has_tokens(REQUEST, 5)
        await case.join("s2")
        adopts = case.broker.freeze_before("s2", writes(RecordState.ROUTED))
        case.fleet.freeze("s1")
        await adopts.reached.wait()
        case.fleet.thaw("s1")
        record = await case.is_answered(LONG)
        assert record.owner == case.fleet.incarnation("s1")
        case.fleet.thaw("s2")
        await asyncio.sleep(0.3)
        assert await case.is_over() == record


async def test_an_adopter_that_lost_its_swap_adopts_when_the_owner_dies_after_all() -> None:
    async with cut_fleet() as case:
        await case.start("s1")
        await case.ask(2 * LONG)
        await case.fleet.client.has_tokens(REQUEST, 5)
        await case.join("s2")
        adopts = case.broker.freeze_before("s2", writes(RecordState.ROUTED))
        case.fleet.freeze("s1")
        await adopts.reached.wait()
        await case.mark(state=RecordState.ROUTED)
        case.fleet.thaw("s2")
        await asyncio.sleep(0.05)
        await case.fleet.kill("s1")
        record = await case.is_answered(2 * LONG)
        assert (record.owner, record.attempt) == (case.fleet.incarnation("s2"), 1)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(tells_the_end, id="event"),
        pytest.param(lambda call: call.kind == "erase", id="erase"),
        pytest.param(writes(RecordState.CLOSED), id="close"),
    ],
)
@pytest.mark.parametrize("after", [False, True])
async def test_the_end_is_journalled_but_not_everything_is_done(where: object, after: bool) -> None:
    """Terminal event, erasure, closing: whichever is missing is done by the adopter, once."""
    async with cut_fleet() as case:
        kill = case.broker.kill_after if after else case.broker.kill_before
        cut = kill("s1", where)  # type: ignore[arg-type]
        await case.start("s1")
        await case.join("s2")
        await case.ask()
        await case.dies(cut)
        record = await case.is_answered()
        closed_by_s1 = after and cut.call is not None and cut.call.kind == "update"
        owner = "s1" if closed_by_s1 else "s2"
        assert (record.owner, record.attempt) == (case.fleet.incarnation(owner), 1)


async def test_record_ending_but_no_end_published_by_the_scheduler() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_before("s1", lambda call: call.is_a(End, kind="record"))
        await case.start("s1")
        await case.join("s2")
        await case.ask(LONG)
        await case.fleet.client.has_tokens(REQUEST, 5)
        await case.cancel()
        await case.dies(cut)
        assert (await case.record()).state is RecordState.ENDING
        record = await case.is_over()
        assert record.owner == case.fleet.incarnation("s2")
        assert record.end is not None
        assert (record.end.reason, record.end.detail) == (EndReason.CANCELLED, "client left")


async def test_record_ending_but_no_end_published_by_the_gateway() -> None:
    async with cut_fleet() as case:
        await case.start("s1")
        await case.ask(LONG)
        await case.fleet.client.has_tokens(REQUEST, 5)
        end = End(request_id=REQUEST, attempt=1, reason=EndReason.EXPIRED, detail="silence")
        await case.mark(state=RecordState.ENDING, end=end)
        record = await case.is_over()
        assert record.end == end


async def test_a_cancel_meets_the_end_on_its_way_into_the_record() -> None:
    """A gateway marked what was just being closed; that record once stayed open for ever."""
    async with cut_fleet() as case:
        cut = case.broker.freeze_before("s1", writes(RecordState.CLOSED))
        await case.start("s1")
        await case.ask()
        await cut.reached.wait()
        await case.cancel()
        case.fleet.thaw("s1")
        record = await case.is_answered(SHORT)
        assert record.end is not None
        assert record.end.reason is EndReason.LENGTH


async def test_a_job_of_a_frozen_scheduler_comes_when_its_attempt_is_long_over() -> None:
    """The record is closed by then; the worker looks it up and stops."""
    async with cut_fleet() as case:
        cut = case.broker.freeze_before("s1", sends_prefill)
        await case.start("s1")
        await case.ask(4 * LONG)
        await cut.reached.wait()
        await case.join("s2")
        await case.fleet.client.has_tokens(REQUEST, 5)
        await case.cancel()
        await case.is_over()
        await case.join("d2", Role.DECODE)
        assert isinstance(cut.call, Call)
        assert isinstance(cut.call.message, PrefillJob)
        job = GenerateJob(generation=cut.call.message.generation)
        answer = await case.fleet.bus.request(
            subjects.job(case.fleet.incarnation("d2")), job, JobAccepted, timeout_s=2
        )
        assert not answer.duplicate
        started = asyncio.get_running_loop().time()
        await nothing_is_left(case.fleet)
        assert asyncio.get_running_loop().time() - started < 3.0
        case.fleet.thaw("s1")


@pytest.mark.parametrize("routed", [True, False])
async def test_a_record_that_somebody_deletes(routed: bool) -> None:
    """It is written again: forgotten by its owner, the request had no end."""
    async with cut_fleet() as case:
        case.fleet.scheduler("s1")
        if routed:
            await case.start()
        await case.fleet.ready()
        await case.ask(LONG + 1200)
        bucket = case.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        if routed:
            await case.fleet.client.has_tokens(REQUEST, 20)
        while await bucket.get(REQUEST) is None:
            await asyncio.sleep(0.01)
        await bucket.delete(REQUEST)
        while await bucket.get(REQUEST) is None:
            await asyncio.sleep(0.1)
        if routed:
            await case.fleet.kill("d1")
            await case.join("d2", Role.DECODE)
        else:
            await case.start()
        await case.is_answered(LONG + 1200)


async def test_a_record_nobody_can_read_kills_nobody() -> None:
    """Whoever looked it up once died of it: its owner, and each worker that had the request."""
    async with cut_fleet() as case:
        await case.start("s1")
        await case.ask(LONG + 1200)
        await case.fleet.client.has_tokens(REQUEST, 20)
        alien = Beat(member=case.fleet.incarnation("x1"), service="newer", count=1)
        await case.fleet.bus.bucket(REQUEST_RECORDS, Beat).put(REQUEST, alien)
        end = await case.fleet.client.ended(REQUEST)
        assert end.reason is EndReason.LENGTH
        assert case.fleet.client.delivered[REQUEST] == toy_answer(PROMPT, LONG + 1200)
        await case.fleet.settled()
        assert len(case.fleet.ledgers["s1"]) == 0
        assert case.fleet.crashes == []
        assert all(not life.task.done() for life in case.fleet.lives.values())


async def test_a_journal_entry_nobody_can_read_kills_no_adopter() -> None:
    """Readers once raised what followers skip: each scheduler that adopted died of it in turn."""
    async with cut_fleet() as case:
        await case.start("s1")
        await case.join("s2")
        await case.ask(LONG)
        await case.fleet.client.has_tokens(REQUEST, 20)
        alien = Beat(member=case.fleet.incarnation("x1"), service="newer", count=1)
        await case.fleet.bus.store(subjects.token(GATEWAY), alien, msg_id="alien", timeout_s=1.0)
        await case.fleet.kill("s1")
        record = await case.is_answered(LONG)
        assert record.owner == case.fleet.incarnation("s2")
        assert case.fleet.crashes == []

"""A worker stops between two of its steps; the request goes on elsewhere. One test per crash point.

`docs/testing.md` names the row of each.
"""

import asyncio
from random import Random

import pytest

from diptych_bus.memory import Faults
from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.fleet import Role
from diptych_contracts.jobs import (
    Cancel,
    CancelDone,
    DecodeJob,
    GenerateJob,
    JobAccepted,
    PrefillJob,
)
from diptych_contracts.journal import End, Fence, Started, TokenEntry, TokenFrame
from diptych_contracts.sampling import Stopping
from diptych_contracts.transfers import Reserve
from diptych_testkit.aftermath import journal_of
from diptych_testkit.builders import REQUEST, a_generation
from diptych_testkit.cut_fleet import LONG, CutFleet, cut_fleet
from diptych_testkit.interruptions import Call

pytestmark = pytest.mark.virtual_time


def asks_for_ticket(call: Call) -> bool:
    return call.is_a(Reserve, kind="request")


def hands_over(call: Call) -> bool:
    return call.is_a(DecodeJob, kind="request")


def frame(call: Call) -> bool:
    return call.is_a(TokenFrame, kind="append") and bool(call.message.entries)


def stored_frame(call: Call) -> bool:
    return call.is_a(TokenFrame, kind="stored") and bool(call.message.entries)


def last_frame(call: Call) -> bool:
    return call.is_a(TokenFrame, kind="stored") and bool(call.message.ends)


def tokens_of(case: CutFleet, attempt: int) -> list[TokenEntry]:
    return [
        part
        for part in journal_of(case.fleet, REQUEST)
        if isinstance(part, TokenEntry) and part.attempt == attempt
    ]


async def test_ticket_given_but_no_block_written() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_after("p1", asks_for_ticket)
        await case.start("s1")
        await case.ask()
        await case.dies(cut)
        await case.join("p2", Role.PREFILL)
        record = await case.is_answered()
        assert (record.attempt, record.lost_attempts) == (2, 1)


async def test_ticket_given_and_everybody_who_knows_of_it_dies() -> None:
    """Nobody is left to cancel: the sweeper takes the ticket back when its lease is over."""
    async with cut_fleet() as case:
        cut = case.broker.kill_after("p1", asks_for_ticket)
        await case.start("s1", lease_s=0.8)
        await case.ask()
        await case.dies(cut)
        await case.fleet.kill("s1")
        holder = subjects.control(case.fleet.incarnation("d1"))
        kv: KvSnapshot = await case.fleet.bus.request(holder, KvAsk(), KvSnapshot, timeout_s=2)
        assert len(kv.transfers) == 1
        await case.fleet.settled(timeout_s=3.0)
        kv = await case.fleet.bus.request(holder, KvAsk(ended=1), KvSnapshot, timeout_s=2)
        assert kv.slots_used == 0


async def test_first_token_published_but_not_handed_over() -> None:
    """It is never sampled again: the next attempt begins behind it."""
    async with cut_fleet() as case:
        cut = case.broker.kill_before("p1", hands_over)
        again = case.broker.note("s1", lambda call: call.is_a(PrefillJob), nth=2)
        await case.start("s1")
        await case.ask()
        await case.dies(cut)
        await case.join("p2", Role.PREFILL)
        record = await case.is_answered()
        assert record.attempt == 2
        (first,) = tokens_of(case, 1)
        assert (first.index, len(first.token_ids)) == (0, 1)
        assert min(entry.index for entry in tokens_of(case, 2)) == 1
        if again.call is not None:  # else the last worker serves alone
            assert again.call.message.generation.prefix_ids == first.token_ids


@pytest.mark.parametrize("when", ["asked", "answered"])
async def test_handed_over_but_the_prefill_worker_never_knew(when: str) -> None:
    """Decode runs and says so in the journal: the death of its prefill worker changes nothing."""
    async with cut_fleet() as case:
        if when == "asked":  # it dies while the answer is on its way
            accepted = case.broker.note("d1", lambda call: call.is_a(JobAccepted))
        else:
            accepted = case.broker.kill_after("p1", hands_over)
        await case.start("s1")
        await case.ask(LONG)
        await accepted.reached.wait()
        await case.fleet.kill("p1")
        record = await case.is_answered(LONG)
        assert (record.attempt, record.lost_attempts) == (1, 0)
        (started,) = [p for p in journal_of(case.fleet, REQUEST) if isinstance(p, Started)]
        assert started.phase == "decode"


async def test_handed_over_and_the_first_token_lost_with_its_prefill_worker() -> None:
    """The decode worker says it too: a gap before everything else once kept the request open."""
    async with cut_fleet() as case:
        lost = case.broker.lose("p1", frame)
        cut = case.broker.kill_after("p1", hands_over)
        await case.start("s1")
        await case.ask(100)
        await case.dies(cut)
        record = await case.is_answered(100)
        assert lost.reached.is_set()
        assert (record.attempt, record.lost_attempts) == (1, 0)


async def test_accepted_by_the_decode_worker_that_dies_before_it_answers() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_before("d1", lambda call: call.is_a(JobAccepted))
        await case.start("s1")
        await case.ask()
        await case.dies(cut)
        await case.join("d2", Role.DECODE)
        record = await case.is_answered()
        assert record.attempt == 2
        assert min(entry.index for entry in tokens_of(case, 2)) == 1


async def test_sampled_but_not_published() -> None:
    """Lost on purpose: nobody saw it, it is sampled again."""
    async with cut_fleet() as case:
        cut = case.broker.kill_before("d1", frame, nth=20)
        await case.start("s1")
        await case.ask(100)
        await case.dies(cut)
        await case.join("d2", Role.DECODE)
        record = await case.is_answered(100)
        assert record.attempt == 2
        last = tokens_of(case, 1)[-1]
        assert isinstance(cut.call, Call)
        (unseen,) = cut.call.message.entries
        assert last.index + len(last.token_ids) == unseen.index
        assert min(entry.index for entry in tokens_of(case, 2)) == unseen.index


async def test_published_but_the_acknowledgement_not_read() -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_after("d1", stored_frame, nth=20)
        await case.start("s1")
        await case.ask(100)
        await case.dies(cut)
        await case.join("d2", Role.DECODE)
        record = await case.is_answered(100)
        assert record.attempt == 2
        assert isinstance(cut.call, Call)
        (stored,) = cut.call.message.entries
        assert min(entry.index for entry in tokens_of(case, 2)) == stored.index + 1


async def test_published_again_because_the_acknowledgement_was_lost() -> None:
    faults = Faults(Random(1), lost_ack_frac=0.2, affects=lambda s: s.startswith("token."))
    async with cut_fleet(faults) as case:
        await case.start("s1")
        await case.ask(LONG)
        record = await case.is_answered(LONG)
        assert record.attempt == 1
        indexes = [entry.index for entry in tokens_of(case, 1)]
        assert len(indexes) > len(set(indexes))


@pytest.mark.parametrize("owner_too", [False, True])
async def test_last_frame_published_but_the_record_open(owner_too: bool) -> None:
    async with cut_fleet() as case:
        cut = case.broker.kill_after("d1", last_frame)
        await case.start("s1")
        await case.join("s2")
        await case.fleet.kill("s1" if not owner_too else "s2")
        if owner_too:
            await case.join("s3")
            owner = case.broker.kill_before("s1", lambda c: c.kind in ("store", "update"), nth=4)
        await case.ask()
        await case.dies(cut)
        if owner_too:
            await case.dies(owner)
        record = await case.is_answered()
        assert (record.attempt, record.lost_attempts) == (1, 0)
        ends = [part for part in journal_of(case.fleet, REQUEST) if isinstance(part, End)]
        assert len(ends) == 1


async def test_a_frozen_worker_wakes_behind_its_fence_and_frees_its_slots() -> None:
    async with cut_fleet() as case:
        await case.start("s1")
        await case.ask(3 * LONG)
        await case.fleet.client.has_tokens(REQUEST, 10)
        case.fleet.freeze("d1")
        await case.join("d2", Role.DECODE)
        client = case.fleet.client
        await client.until(lambda: client.views[REQUEST].attempt == 2)
        await client.has_tokens(REQUEST, client.views[REQUEST].attempt_start + 5)
        told = case.broker.note("s1", lambda call: call.is_a(Cancel, kind="request"))
        case.fleet.thaw("d1")
        await told.reached.wait()
        await case.fleet.until_load(
            lambda: case.fleet.loads["d1"].kv_tokens_used == 0, timeout_s=2.0
        )
        assert REQUEST not in client.ends
        record = await case.is_answered(3 * LONG)
        assert record.attempt == 2
        parts = journal_of(case.fleet, REQUEST)
        fenced = next(n for n, part in enumerate(parts) if isinstance(part, Fence))
        late = [p for p in parts[fenced:] if isinstance(p, TokenEntry) and p.attempt == 1]
        assert late, "what it says on waking comes after the fence, and counts for nothing"


async def test_a_frozen_worker_whose_owner_is_dead_looks_its_attempt_up() -> None:
    """Nobody repeats the cancel: the adopter does not know who ran the old attempt."""
    async with cut_fleet() as case:
        await case.start("s1")
        await case.ask(3 * LONG)
        client = case.fleet.client
        await client.has_tokens(REQUEST, 10)
        case.fleet.freeze("d1")
        await case.join("d2", Role.DECODE)
        await case.join("s2")
        await client.until(lambda: client.views[REQUEST].attempt == 2)
        await client.has_tokens(REQUEST, client.views[REQUEST].attempt_start + 5)
        await case.fleet.kill("s1")
        case.fleet.thaw("d1")
        await case.fleet.until_load(
            lambda: case.fleet.loads["d1"].kv_tokens_used == 0, timeout_s=4.0
        )
        assert REQUEST not in client.ends
        record = await case.is_answered(3 * LONG)
        assert (record.owner, record.attempt) == (case.fleet.incarnation("s2"), 2)


async def test_a_job_that_comes_twice_runs_once() -> None:
    faults = Faults(
        Random(3), duplicate_frac=1.0, affects=lambda s: s.startswith(("job.", "kv.", "cancel."))
    )
    async with cut_fleet(faults) as case:
        accepted = [
            case.broker.note(worker, lambda call: call.is_a(JobAccepted), nth=2)
            for worker in ("p1", "d1")
        ]
        await case.start("s1")
        await case.ask(100)
        record = await case.is_answered(100)
        assert record.attempt == 1
        for cut in accepted:
            assert cut.call is not None
            assert cut.call.message.duplicate
        indexes = [entry.index for entry in tokens_of(case, 1)]
        assert indexes == [0, *range(100)]  # the one that was handed over is said by both


@pytest.mark.parametrize("role", list(Role))
async def test_a_cancel_that_comes_with_its_job_frees_the_seat(role: Role) -> None:
    """The job's task had not begun: cancelled then, it never ran its own clean-up."""
    async with cut_fleet() as case:
        await case.start()
        worker = case.fleet.incarnation("p1" if role is Role.PREFILL else "d1")
        generation = a_generation(REQUEST, stopping=Stopping(max_tokens=LONG))
        job = (
            PrefillJob(
                generation=generation, decode_worker=case.fleet.incarnation("d1"), link="shm"
            )
            if role is Role.PREFILL
            else GenerateJob(generation=generation)
        )
        cancel = Cancel(request_id=REQUEST, attempt=1)
        bus = case.fleet.bus
        accepted, done = await asyncio.gather(
            bus.request(subjects.job(worker), job, JobAccepted, timeout_s=2),
            bus.request(subjects.cancel(worker), cancel, CancelDone, timeout_s=2),
        )
        assert not accepted.duplicate
        assert (done.request_id, done.attempt) == (REQUEST, 1)
        await case.fleet.settled(timeout_s=2.0)

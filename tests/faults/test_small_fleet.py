"""The whole request path in one process: memory bus, toy engine, real KV links.

Every test ends with the four invariants: each request ended exactly once (the client asserts it),
no gap and no repeat (the answer equals the engine's own), nothing held, no limit exceeded.
"""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Literal

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from diptych_bus.memory import Faults, MemoryBroker
from diptych_contracts import subjects
from diptych_contracts.fleet import Role
from diptych_contracts.ids import RequestId
from diptych_contracts.jobs import Cancel, CancelDone
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Forced, Mode, RecordState, Request, RequestRecord
from diptych_contracts.sampling import Sampling, Stopping
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_engine.port import StepInput
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

pytestmark = pytest.mark.virtual_time
PROMPT = tuple(range(1, 101))


def slow_engine(step_s: float = 0.004) -> ToyStepEngine:
    return ToyStepEngine(step_s=step_s)


def long_request(max_tokens: int) -> Request:
    return a_request("r1", prompt_ids=PROMPT, stopping=Stopping(max_tokens=max_tokens))


async def a_pair(fleet: SmallFleet, *, decodes: int = 1) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=slow_engine())
    for number in range(1, decodes + 1):
        fleet.worker(f"d{number}", Role.DECODE, engine=slow_engine())
    await fleet.ready()


async def is_answered(fleet: SmallFleet, request_id: str, tokens: int = 16) -> None:
    end = await fleet.client.ended(request_id)
    assert (end.reason, end.tokens) == (EndReason.LENGTH, tokens)
    assert fleet.client.delivered[request_id] == toy_answer(PROMPT, tokens)


Link = Literal["shm", "tcp"]
both_links = pytest.mark.parametrize("link", ["shm", "tcp"])


@both_links
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("prompt_tokens", [1, 63, 64, 65, 300])
async def test_both_modes_give_the_engines_own_answer(
    mode: Mode, prompt_tokens: int, link: Link
) -> None:
    prompt = tuple(range(1, prompt_tokens + 1))
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL)
        fleet.worker("d1", Role.DECODE)
        await fleet.ready()
        forced = Forced(mode=mode, link=link)
        await fleet.client.send(a_request("r1", prompt_ids=prompt, forced=forced))
        end = await fleet.client.ended("r1")
        assert end.reason is EndReason.LENGTH
        assert fleet.client.delivered["r1"] == toy_answer(prompt, 16)
        assert end.report is not None
        assert end.report.mode == mode
        assert end.report.link == (link if mode is Mode.REMOTE else "")
        assert end.report.prefill_j > 0
        assert end.report.decode_j > 0
        await fleet.settled()


async def test_a_record_is_closed_and_its_request_erased() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await fleet.client.send(a_request("r1", prompt_ids=PROMPT))
        await is_answered(fleet, "r1")
        await fleet.settled()
        record = await fleet.closed("r1")
        assert await fleet.bus.stored("REQUESTS", record.request_seq) is None


@both_links
@pytest.mark.parametrize("victim", ["d1", "p1"])
async def test_a_dead_worker_costs_no_token(victim: str, link: Link) -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        request = a_request("r1", prompt_ids=PROMPT, stopping=Stopping(max_tokens=200))
        request = msgspec.structs.replace(request, forced=Forced(link=link))
        await fleet.client.send(request)
        await fleet.client.has_tokens("r1", 10)
        fleet.worker("d2", Role.DECODE, engine=slow_engine())
        await fleet.ready("d2")
        await fleet.kill(victim)
        await is_answered(fleet, "r1", tokens=200)
        await fleet.settled()


@both_links
async def test_a_prefill_worker_that_dies_while_prefilling_is_replaced(link: Link) -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=slow_engine(1.0))
        fleet.worker("d1", Role.DECODE, engine=slow_engine())
        await fleet.ready()
        await fleet.client.send(a_request("r1", prompt_ids=PROMPT, forced=Forced(link=link)))
        await fleet.until_reserved("d1")
        await fleet.kill("p1")
        await is_answered(fleet, "r1")
        await fleet.settled()


async def test_a_dead_scheduler_is_succeeded_and_running_work_goes_on() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await fleet.client.send(
            a_request("r1", prompt_ids=PROMPT, stopping=Stopping(max_tokens=1500))
        )
        await fleet.client.has_tokens("r1", 10)
        await fleet.kill("s1")
        fleet.scheduler("s2")
        await is_answered(fleet, "r1", tokens=1500)
        assert fleet.client.views["r1"].attempt == 1
        await fleet.settled()
        record = await fleet.closed("r1")
        assert (record.owner, record.adoptions) == (fleet.incarnation("s2"), 0)


async def test_a_request_sent_while_no_scheduler_lives_is_served_later() -> None:
    async with small_fleet() as fleet:
        fleet.worker("d1", Role.DECODE)
        await fleet.ready()
        await fleet.client.send(a_request("r1", prompt_ids=PROMPT))
        fleet.scheduler()
        await is_answered(fleet, "r1")


async def test_a_cancelled_request_ends_and_frees_both_sides() -> None:
    async with small_fleet() as fleet:
        await a_pair(fleet)
        await fleet.client.send(
            a_request("r1", prompt_ids=PROMPT, stopping=Stopping(max_tokens=1000))
        )
        await fleet.client.has_tokens("r1", 5)
        records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        kept = await records.get("r1")
        assert kept is not None
        cancelling = msgspec.structs.replace(kept.value, state=RecordState.CANCELLING)
        await records.update("r1", cancelling, kept.revision)
        end = await fleet.client.ended("r1")
        assert end.reason is EndReason.CANCELLED
        await fleet.settled()


async def test_a_cancel_that_is_asked_again_frees_no_less() -> None:
    """The scheduler repeats a cancel; the second one once broke the withdrawal of the first."""
    steps = 0

    def count(_batch: Sequence[StepInput]) -> None:
        nonlocal steps
        steps += 1

    long_prompt = a_request("r1", prompt_ids=tuple(range(1, 999)))
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(on_step=count, step_s=0.5))
        fleet.worker("d1", Role.DECODE)
        await fleet.ready()
        await fleet.client.send(long_prompt)
        await fleet.until_load(lambda: steps >= 2)
        subject = subjects.cancel(fleet.incarnation("p1"))
        cancel = Cancel(request_id=RequestId("r1"), attempt=1)
        asked = []
        for _ in range(2):
            asking = fleet.bus.request(subject, cancel, CancelDone, timeout_s=5)
            asked.append(asyncio.create_task(asking))
            await asyncio.sleep(0.05)
        await asyncio.gather(*asked)
        await fleet.settled(timeout_s=5)
        records = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        kept = await records.get("r1")
        assert kept is not None
        cancelling = msgspec.structs.replace(kept.value, state=RecordState.CANCELLING)
        await records.update("r1", cancelling, kept.revision)
        await fleet.client.ended("r1")


async def test_more_requests_than_seats_wait_their_turn() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL)
        fleet.worker("d1", Role.DECODE, engine=ToyStepEngine(max_sequences=2))
        await fleet.ready()
        names = [f"r{number}" for number in range(12)]
        for name in names:
            await fleet.client.send(a_request(name, prompt_ids=PROMPT))
        for name in names:
            await is_answered(fleet, name)
        await fleet.settled()


async def test_seeded_sampling_gives_the_same_answer_in_both_modes() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    async with small_fleet() as fleet:
        await a_pair(fleet)
        for mode in Mode:
            await fleet.client.send(
                a_request(mode, prompt_ids=PROMPT, sampling=sampling, forced=Forced(mode=mode))
            )
        for mode in Mode:
            await fleet.client.ended(mode)
        answers = fleet.client.delivered
        assert answers["local"] == answers["remote"]
        assert answers["local"] != toy_answer(PROMPT, 16)


@both_links
@pytest.mark.parametrize("seed", range(20))
async def test_a_bad_network_changes_no_answer(seed: int, link: Link) -> None:
    faults = Faults(
        Random(seed),
        drop_frac=0.1,
        duplicate_frac=0.1,
        delay_frac=0.2,
        lost_ack_frac=0.1,
        affects=lambda subject: subject.startswith(("job.", "kv.", "cancel.", "token.")),
    )
    async with small_fleet(MemoryBroker(faults=faults)) as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL)
        fleet.worker("d1", Role.DECODE)
        await fleet.ready()
        names = [f"r{number}" for number in range(4)]
        for name in names:
            await fleet.client.send(a_request(name, prompt_ids=PROMPT, forced=Forced(link=link)))
        for name in names:
            await is_answered(fleet, name)
        await fleet.settled()


class BrokenEngine(ToyStepEngine):
    """Its logits are NaN, as weights that overflow make them."""

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        computed = super().step(inputs)
        return [None if logits is None else logits * np.float32("nan") for logits in computed]


@pytest.mark.parametrize("mode", list(Mode))
async def test_what_fails_anywhere_is_tried_once(mode: Mode) -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=BrokenEngine())
        fleet.worker("d1", Role.DECODE, engine=BrokenEngine())
        await fleet.ready()
        await fleet.client.send(a_request("r1", prompt_ids=PROMPT, forced=Forced(mode=mode)))
        end = await fleet.client.ended("r1")
        assert (end.reason, end.attempt) == (EndReason.FAILED, 1)
        assert "not finite" in end.detail

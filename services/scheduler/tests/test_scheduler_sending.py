"""How long a worker may take to answer a job: judged time, which a frozen bus does not spend."""

import asyncio
from collections.abc import Callable

from diptych_bus.memory import MemoryBroker
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import GenerateJob
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import Event, JobAnswered, SendJob
from diptych_policy.recovery import Ledger
from diptych_scheduler.journals import Journals
from diptych_scheduler.performing import Performer
from diptych_scheduler.recording import Records
from diptych_testkit.builders import REQUEST, a_generation

WORKER = Incarnation("d1")
ANSWER_S = 0.2


class JudgeOnly:
    """A scheduler that only has a clock."""

    me = Incarnation("s1")

    def __init__(self) -> None:
        self.judged_s = 5.0
        self.told: list[Event] = []

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def alive(self, member: Incarnation) -> bool:
        return True

    def current(self, request_id: RequestId, attempt: int) -> bool:
        return True


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_frozen_bus_costs_no_attempt() -> None:
    """Frozen for 2 s, too short for clients to notice, it had live workers declared dead."""
    bus = MemoryBroker().connect("s1")
    owner = JudgeOnly()
    journals = Journals(bus, Ledger(owner.me, Fleet()), owner.tell)
    async with asyncio.TaskGroup() as tasks:
        records = Records(owner, bus, journals, resume_window_s=900.0)
        performer = Performer(owner, bus, records, tasks, job_answer_s=ANSWER_S)
        job = GenerateJob(generation=a_generation())
        performer.order([SendJob(REQUEST, 1, WORKER, job)])
        await asyncio.sleep(3 * ANSWER_S)
        assert owner.told == []
        owner.judged_s += 2 * ANSWER_S
        await until(lambda: bool(owner.told))
    assert owner.told == [JobAnswered(REQUEST, 1, WORKER, None)]

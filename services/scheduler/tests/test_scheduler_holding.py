"""A scheduler that is slow keeps what it pulled; one that is frozen or dead does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from diptych_bus.memory import MemoryBroker
from diptych_bus.port import Pulled
from diptych_chassis.repeating import every
from diptych_contracts import subjects
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.streams import SCHEDULERS
from diptych_policy.fleet import Fleet
from diptych_policy.lifecycle import Event, RequestArrived
from diptych_policy.recovery import Ledger
from diptych_scheduler.intake import Intake
from diptych_scheduler.journals import Journals
from diptych_testkit.builders import MODEL, a_request

ME = Incarnation("s1-1")
LATE_S = 1.5 * SCHEDULERS.ack_wait_s


class Desk:
    """An intake whose records take for ever to be created."""

    def __init__(self) -> None:
        self.arrived: list[RequestArrived] = []
        self.pulled: dict[RequestId, Pulled] = {}

    def tell(self, event: Event) -> None:
        assert isinstance(event, RequestArrived)
        self.arrived.append(event)

    def expect(self, request_id: RequestId, pulled: Pulled) -> None:
        self.pulled[request_id] = pulled

    def expected(self) -> list[Pulled]:
        return list(self.pulled.values())


@asynccontextmanager
async def an_intake(*, holding: bool) -> AsyncIterator[Desk]:
    bus, desk = MemoryBroker().connect("s1"), Desk()
    journals = Journals(bus, Ledger(ME, Fleet()), desk.tell)
    intake = Intake(
        bus, journals, records=desk, tell=desk.tell, recorded=lambda _: False, seq_of=lambda _: 0
    )
    await bus.pull(SCHEDULERS, intake.take, paused=lambda: False)
    tasks = [asyncio.create_task(intake.run())]
    if holding:
        tasks.append(asyncio.create_task(every(0.5, intake.hold)))
    for number in range(3):
        request = a_request(f"r{number}")
        await bus.store(
            subjects.request("interactive", MODEL), request, msg_id=f"r{number}", timeout_s=60
        )
    yield desk
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await bus.close()


async def test_what_a_slow_scheduler_works_on_is_not_handed_out_again() -> None:
    """At full CPU load requests came five times, and then failed as never taken on."""
    async with an_intake(holding=True) as desk:
        await asyncio.sleep(LATE_S)
        assert [(e.request.request_id, e.deliveries) for e in desk.arrived] == [
            ("r0", 1),
            ("r1", 1),
            ("r2", 1),
        ]


async def test_what_nobody_holds_comes_again_and_that_is_no_word_against_it() -> None:
    """Five deliveries end a request; those to a scheduler that lives are none of them."""
    async with an_intake(holding=False) as desk:
        await asyncio.sleep(LATE_S)
        assert len(desk.arrived) == 6
        assert {event.deliveries for event in desk.arrived} == {1}

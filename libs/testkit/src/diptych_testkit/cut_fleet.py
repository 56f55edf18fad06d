"""A small fleet whose members stop between two steps, and the places where they do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from diptych_bus.memory import Faults
from diptych_contracts.events import RequestEnded
from diptych_contracts.fleet import Role
from diptych_contracts.jobs import PrefillJob
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_testkit.aftermath import dead_letters, nothing_is_left
from diptych_testkit.builders import REQUEST, a_request
from diptych_testkit.interruptions import Call, Cut, CuttingBroker, Where, state_of
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

PROMPT = tuple(range(1, 101))
SHORT, LONG = 16, 1200
"""Tokens of an answer: over in a moment, and after some seconds."""


class CutFleet:
    """Starts members, stops them at a cut, and checks what is left."""

    def __init__(self, fleet: SmallFleet, broker: CuttingBroker) -> None:
        self.fleet = fleet
        self.broker = broker

    async def start(self, *schedulers: str, decodes: int = 1, **settings: Any) -> None:
        """Schedulers, one prefill worker `p1`, and decode workers `d1`, `d2`, ..."""
        for name in schedulers:
            self.fleet.scheduler(name)
        self.fleet.worker("p1", Role.PREFILL, engine=slow_engine(), **settings)
        for number in range(1, decodes + 1):
            self.fleet.worker(f"d{number}", Role.DECODE, engine=slow_engine(), **settings)
        await self.fleet.ready()

    async def join(self, name: str, role: Role | None = None) -> None:
        """One more worker, or (without a role) scheduler."""
        if role is None:
            self.fleet.scheduler(name)
        else:
            self.fleet.worker(name, role, engine=slow_engine())
        await self.fleet.ready(name)

    async def ask(self, tokens: int = SHORT, request_id: str = REQUEST, **changes: Any) -> None:
        """Send a request."""
        stopping = Stopping(max_tokens=tokens)
        await self.fleet.client.send(
            a_request(request_id, prompt_ids=PROMPT, stopping=stopping, **changes)
        )

    async def dies(self, cut: Cut) -> None:
        """Wait until a cut has killed its member."""
        await cut.reached.wait()
        await self.fleet.kill(cut.member)

    async def is_answered(self, tokens: int = SHORT, request_id: str = REQUEST) -> RequestRecord:
        """The closed record of a request whose answer is the undisturbed one."""
        end = await self.fleet.client.ended(request_id)
        assert end.reason is EndReason.LENGTH, end
        assert self.fleet.client.delivered[request_id] == toy_answer(PROMPT, tokens)
        return await self.is_over(request_id)

    async def is_over(self, request_id: str = REQUEST) -> RequestRecord:
        """The closed record of a request that left nothing behind."""
        records = await nothing_is_left(self.fleet, (request_id,))
        assert dead_letters(self.fleet) == []
        return records[request_id]

    async def record(self, request_id: str = REQUEST) -> RequestRecord:
        """The record as it stands."""
        kept = await self.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).get(request_id)
        assert kept is not None
        return kept.value

    async def mark(self, request_id: str = REQUEST, **changes: Any) -> None:
        """Change the record, as a gateway may."""
        bucket = self.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        kept = await bucket.get(request_id)
        assert kept is not None
        await bucket.update(
            request_id, msgspec.structs.replace(kept.value, **changes), kept.revision
        )

    async def cancel(self, request_id: str = REQUEST) -> None:
        """As a gateway does whose client has left."""
        await self.mark(request_id, state=RecordState.CANCELLING, cancel_reason="client left")


def slow_engine(step_s: float = 0.002, **settings: Any) -> ToyStepEngine:
    """An engine whose steps take a while."""
    return ToyStepEngine(step_s=step_s, **settings)


@asynccontextmanager
async def cut_fleet(faults: Faults | None = None, **broker: Any) -> AsyncIterator[CutFleet]:
    """A fleet without members yet; `broker` as in `MemoryBroker`."""
    cutting = CuttingBroker(faults=faults, **broker)
    async with small_fleet(cutting) as fleet:
        yield CutFleet(fleet, cutting)


# Places


def creates_record(call: Call) -> bool:
    """A request's record."""
    return call.is_a(RequestRecord, kind="create")


def acknowledges(call: Call) -> bool:
    """A pulled request."""
    return call.kind == "ack"


def sends_prefill(call: Call) -> bool:
    """A job to a prefill worker."""
    return call.is_a(PrefillJob, kind="request")


def writes(state: RecordState, *, attempt: int | None = None) -> Where:
    """A record in `state`."""

    def place(call: Call) -> bool:
        written = call.kind == "update" and state_of(call) == state
        return written and attempt in (None, call.message.attempt)

    return place


def tells_the_end(call: Call) -> bool:
    """A request's terminal event."""
    return call.is_a(RequestEnded, kind="store")

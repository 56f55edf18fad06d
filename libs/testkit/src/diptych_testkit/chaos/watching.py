"""What the bus says during the run: records, journals and loads, and the audit afterwards."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.port import Delivery, Gone, Kept, StoredItem
from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.errors import BusAway
from diptych_contracts.fleet import WorkerLoad
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import Fence, JournalEntry, TokenEntry
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS, REQUESTS
from diptych_policy.journal import RequestView, parts
from diptych_testkit.chaos.plan import Target
from diptych_testkit.live_stack import LiveStack

_CALL_S = 2.0
_LOAD_S = 2.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker still holds."""

    worker: str
    running: int
    waiting: int
    kv_tokens: int
    slots: int
    transfers: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting or self.kv_tokens or self.slots or self.transfers)


class Watch:
    """An observer on the bus; made by `start`."""

    def __init__(self, bus: JetStreamBus, stack: LiveStack) -> None:
        self._bus = bus
        self._stack = stack
        self.records: dict[str, RequestRecord] = {}
        """The newest record of each request, those that have expired included."""
        self.fences_s: dict[str, list[float]] = defaultdict(list)
        """When each new attempt was announced."""
        self._newest: dict[str, int] = {}
        self._streaming: dict[str, int] = {}
        """The attempt whose tokens were last seen."""
        self._loads: dict[str, WorkerLoad] = {}

    @classmethod
    async def start(cls, stack: LiveStack) -> "Watch":
        """Connect and listen."""
        watch = cls(await stack.join(), stack)
        records = watch._bus.bucket(REQUEST_RECORDS, RequestRecord)
        await records.watch(watch._on_record)
        await watch._bus.subscribe(subjects.LIVES, watch._on_journal)
        await watch._bus.subscribe(subjects.LOADS, watch._on_load)
        return watch

    async def close(self) -> None:
        """Listen no more."""
        await self._bus.close()

    def hit(self, target: Target, member: str) -> frozenset[str]:
        """Requests that depend on `member` now."""
        return frozenset(
            request_id
            for request_id, record in self.records.items()
            if record.state is not RecordState.CLOSED and self._depends(record, target, member)
        )

    def _depends(self, record: RequestRecord, target: Target, member: str) -> bool:
        assignment = record.assignment
        match target:
            case Target.GATEWAY:
                return record.gateway == member
            case Target.SCHEDULER:
                return record.owner == member
            case Target.DECODE:
                return assignment is not None and assignment.decode == member
            case Target.PREFILL:
                started = self._streaming.get(record.request_id) == record.attempt
                return assignment is not None and assignment.prefill == member and not started
            case _:
                return True

    def _on_record(self, change: Kept[RequestRecord] | Gone) -> None:
        if isinstance(change, Kept):
            self.records[change.value.request_id] = change.value

    def _on_load(self, delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        self._loads[load.worker] = load

    def _on_journal(self, delivery: Delivery) -> None:
        now_s = time.monotonic()
        for part in parts(delivery.decode(JournalEntry)):
            match part:
                case Fence(request_id=request_id, attempt=attempt):
                    if attempt > self._newest.get(request_id, 1):
                        self._newest[request_id] = attempt
                        self.fences_s[request_id].append(now_s)
                case TokenEntry(request_id=request_id, attempt=attempt):
                    self._streaming[request_id] = attempt

    # The audit

    def unended(self) -> list[str]:
        """Requests whose record is not closed."""
        return [
            f"{request_id} is {record.state}"
            for request_id, record in self.records.items()
            if record.state is not RecordState.CLOSED and record.request_seq
        ]

    async def ended(self, timeout_s: float) -> bool:
        """Wait until every record is closed; False if `timeout_s` ran out."""
        give_up_s = time.monotonic() + timeout_s
        while self.unended():
            if time.monotonic() > give_up_s:
                return False
            await asyncio.sleep(0.1)
        return True

    async def held(self, workers: Iterator[str]) -> list[Held]:
        """What each of `workers` holds now."""
        self._loads.clear()
        await asyncio.sleep(_LOAD_S)
        return [await self._held_by(worker) for worker in workers]

    async def _held_by(self, worker: str) -> Held:
        load = self._loads.get(worker)
        try:
            snapshot: KvSnapshot = await self._bus.request(
                subjects.control(Incarnation(worker)), KvAsk(), KvSnapshot, timeout_s=_CALL_S
            )
        except BusAway:
            return Held(worker, -1, -1, -1, -1, ("it does not answer",))
        if load is None:
            return Held(worker, -1, -1, -1, -1, ("it sends no load",))
        transfers = tuple(f"{t.transfer_id} {t.state}" for t in snapshot.transfers)
        return Held(
            worker, load.running, load.waiting, load.kv_tokens_used, snapshot.slots_used, transfers
        )

    async def stored_requests(self) -> list[str]:
        """Messages left in stream `REQUESTS`, and what the records say of them."""
        found = self._bus.all_stored(REQUESTS.name, subject=REQUESTS.subjects[0])
        return [self._stored(item) async for item in found]

    def _stored(self, item: StoredItem) -> str:
        request: Request = item.delivery.decode(Request)
        record = self.records.get(request.request_id)
        said = f"{record.state} with {record.request_seq}" if record else "without a record"
        return f"{request.request_id}, stored as {item.seq}, is {said}"

    async def answers(self) -> dict[str, RequestView]:
        """Every request as its journal tells it."""
        views = {request_id: RequestView(r.request_id) for request_id, r in self.records.items()}
        for gateway in {record.gateway for record in self.records.values()}:
            async for item in self._bus.read(gateway, after_seq=0):
                for part in parts(item.entry):
                    if (view := views.get(part.request_id)) is not None:
                        view.apply(part)
        return views

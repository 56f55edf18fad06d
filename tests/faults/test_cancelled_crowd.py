"""A thousand requests, a third of them cancelled at any moment: nothing is left of them."""

import asyncio
import gc
from collections import Counter
from random import Random

import pytest

from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.fleet import Role
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import REQUEST_RECORDS, REQUESTS
from diptych_gateway.keeping.records import Records
from diptych_scheduler.performing import Performer
from diptych_testkit.aftermath import nothing_is_left
from diptych_testkit.builders import GATEWAY, a_request
from diptych_testkit.cut_fleet import slow_engine
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import toy_answer

pytestmark = pytest.mark.virtual_time
REQUESTS_IN_ALL = 1000
AT_ONCE = 48
CANCELLED_FRAC = 0.3
PROMPTS = [tuple(n % 49 + 1 for n in range(length)) for length in (20, 70, 200)]
TOKENS = 24
VOCAB_SIZE = 50
PATIENCE = ("accepted", "queued", "prefilling", "transferring", "decoding", "ending")


class Crowd:
    """Clients that ask, and some that leave."""

    def __init__(self, fleet: SmallFleet, records: Records) -> None:
        self.fleet = fleet
        self.records = records
        self.rng = Random(0)
        self.left_at: Counter[str] = Counter()
        self.reasons: Counter[EndReason] = Counter()
        self.gate = asyncio.Semaphore(AT_ONCE)

    async def ask(self, number: int) -> None:
        prompt = self.rng.choice(PROMPTS)
        request = a_request(f"r{number}", prompt_ids=prompt, stopping=Stopping(max_tokens=TOKENS))
        leaves = self.rng.random() < CANCELLED_FRAC
        patience = self.rng.choice(PATIENCE)
        async with self.gate:
            client = self.fleet.client
            await client.send(request)
            if leaves:
                await self.wait(request.request_id, patience)
                self.left_at[await self.stage(request.request_id)] += 1
                self.records.cancel(request_at(request.request_id), "the client left")
            end = await client.ended(request.request_id)
        self.reasons[end.reason] += 1
        delivered = client.delivered[request.request_id]
        assert delivered == toy_answer(prompt, TOKENS, vocab_size=VOCAB_SIZE)[: len(delivered)]
        if end.reason is EndReason.LENGTH:
            assert len(delivered) == TOKENS
        else:
            assert leaves
            assert end.reason is EndReason.CANCELLED

    async def wait(self, request_id: str, patience: str) -> None:
        """Until a moment in a stage, as far as a client can tell."""
        match patience:
            case "accepted":
                return
            case "queued":
                await asyncio.sleep(self.rng.uniform(0, 0.02))
            case "prefilling" | "transferring":
                await asyncio.sleep(self.rng.uniform(0, 0.05))
            case "decoding":
                await self.fleet.client.has_tokens(request_id, self.rng.randint(1, TOKENS - 1))
            case "ending":
                await self.fleet.client.has_tokens(request_id, TOKENS)

    async def stage(self, request_id: str) -> str:
        kept = await self.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).get(request_id)
        if kept is None:
            return "no record"
        tokens = len(self.fleet.client.delivered[request_id])
        if kept.value.state is RecordState.ROUTED:
            return {0: "prefilling", 1: "transferring"}.get(tokens, "decoding")
        return str(kept.value.state)


def request_at(request_id: str) -> object:
    return a_request(request_id, gateway=GATEWAY)


async def test_nothing_is_left_of_a_thousand_requests_with_a_third_cancelled() -> None:
    async with small_fleet() as fleet:
        for name in ("s1", "s2"):
            fleet.scheduler(name)
        for number in (1, 2):
            fleet.worker(
                f"p{number}", Role.PREFILL, engine=slow_engine(0.002, vocab_size=VOCAB_SIZE)
            )
            fleet.worker(
                f"d{number}",
                Role.DECODE,
                engine=slow_engine(0.002, vocab_size=VOCAB_SIZE, max_sequences=8),
            )
        await fleet.ready()
        records = Records(fleet.broker.connect("gateway"), GATEWAY)
        marking = asyncio.create_task(records.run())
        crowd = Crowd(fleet, records)
        async with asyncio.TaskGroup() as asking:
            for number in range(REQUESTS_IN_ALL):
                asking.create_task(crowd.ask(number))
        assert await records.settled(5.0)
        marking.cancel()

        names = [f"r{number}" for number in range(REQUESTS_IN_ALL)]
        closed = await nothing_is_left(fleet, names)
        assert crowd.reasons[EndReason.CANCELLED] > 0.15 * REQUESTS_IN_ALL
        assert {"queued", "prefilling", "decoding"} <= crowd.left_at.keys()
        assert all(record.lost_attempts == 0 for record in closed.values())
        await remembers_nothing(fleet)


async def remembers_nothing(fleet: SmallFleet) -> None:
    """No slot, no transfer, no entry of a table, no key without an end."""
    for name in ("p1", "p2", "d1", "d2"):
        subject = subjects.control(fleet.incarnation(name))
        kv = await fleet.bus.request(subject, KvAsk(), KvSnapshot, timeout_s=2.0)
        assert (kv.slots_used, kv.transfers) == (0, ())
    for ledger in fleet.ledgers.values():
        assert len(ledger) == 0
        assert ledger.peers() == set()
    buses = [life.bus for life in fleet.lives.values()]
    performers = [p for p in gc.get_objects() if isinstance(p, Performer) and p._bus in buses]
    assert len(performers) == 2
    for performer in performers:
        assert (len(performer._queues), len(performer._records)) == (0, 0)
    store = fleet.broker.bucket(REQUEST_RECORDS)
    assert all(value.expiry is not None for value in store.values.values())
    assert fleet.broker.streams[REQUESTS.name].next_after(0) is None

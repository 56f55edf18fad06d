"""A thousand requests, real server and processes, a third of the clients leave: nothing stays."""

import asyncio
import base64
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.jetstream.answers import api
from diptych_bus.port import Delivery, Gone, Kept
from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.fleet import WorkerLoad
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import DEAD, REQUEST_RECORDS, REQUESTS, RESUME_WINDOW_S
from diptych_testkit.live_stack import MODEL, LiveStack, Process

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

REQUESTS_IN_ALL = 1000
AT_ONCE = 48
LEAVING_FRAC = 0.3
TOKENS = 48
OWNED = ("diptych_scheduler_owned_requests", "diptych_scheduler_queued_requests")
SETTLED_S = 120.0
"""After the last request nothing may be held without an owner."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    live = LiveStack(Path(tmp_path_factory.mktemp("stack")), engine="sim", patient=True)
    try:
        live.start_all()
        second = live.start("scheduler")
        second.wait_ready()
        yield live
    finally:
        live.close()


class Crowd:
    """Clients that ask, and some that leave at a moment of their own."""

    def __init__(self, stack: LiveStack, seed: int) -> None:
        self.rng = Random(seed)
        self.outcomes: Counter[str] = Counter()
        self._url = f"{stack.base_url}/chat/completions"
        self._gate = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=AT_ONCE)
        self._http = httpx.AsyncClient(timeout=120, limits=limits)

    async def run(self) -> None:
        async with self._http, asyncio.TaskGroup() as asking:
            for _ in range(REQUESTS_IN_ALL):
                asking.create_task(self._ask())

    async def _ask(self) -> None:
        words = " ".join(["word"] * self.rng.choice((4, 40, 300)))
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        leaves = self.rng.random() < LEAVING_FRAC
        async with self._gate:
            if not leaves:
                self.outcomes[await self._read(body, None)] += 1
            elif self.rng.random() < 0.5:  # before, or just when, its first token comes
                patience_s = self.rng.uniform(0.0, 0.3)
                try:
                    async with asyncio.timeout(patience_s):
                        outcome = await self._read(body, None)
                except TimeoutError:
                    outcome = "left early"
                self.outcomes[outcome] += 1
            else:
                outcome = await self._read(body, self.rng.randrange(1, TOKENS))
                self.outcomes[outcome] += 1

    async def _read(self, body: dict[str, Any], until: int | None) -> str:
        """How a stream ended; left after `until` chunks."""
        chunks = 0
        async with self._http.stream("POST", self._url, json=body) as answer:
            if answer.status_code != 200:
                return str(answer.status_code)
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "whole"
                if line.startswith("event: error") or '"error"' in line:
                    return "error"
                chunks += line.startswith("data: ")
                if until is not None and chunks > until:
                    return "left"
        return "broken off"


async def test_nothing_is_left_of_a_thousand_requests(stack: LiveStack) -> None:
    crowd = Crowd(stack, seed=4)
    async with asyncio.timeout(400):
        await crowd.run()
    assert set(crowd.outcomes) <= {"whole", "left", "left early"}, crowd.outcomes
    assert crowd.outcomes["left"] + crowd.outcomes["left early"] > 100, crowd.outcomes

    bus = await stack.join()
    try:
        await until_settled(bus)
        workers = [p.incarnation for p in stack.processes if p.service.endswith("worker")]
        await holds_nothing(bus, workers)
        await keeps_no_open_record(bus)
        assert await bus_messages(bus, REQUESTS.name) == 0
        assert await bus_messages(bus, DEAD.name) == 0
    finally:
        await bus.close()
    for scheduler in (p for p in stack.processes if p.service == "scheduler"):
        async with asyncio.timeout(SETTLED_S):
            while sum([(await metrics_of(scheduler)).get(name, 0) for name in OWNED]):
                await asyncio.sleep(0.05)


async def until_settled(bus: JetStreamBus) -> None:
    """Every record is closed within `SETTLED_S`."""
    open_: set[str] = set()

    def note(change: Kept[RequestRecord] | Gone) -> None:
        open_.discard(change.key)
        if isinstance(change, Kept) and change.value.state is not RecordState.CLOSED:
            open_.add(change.key)

    watch = await bus.bucket(REQUEST_RECORDS, RequestRecord).watch(note)
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + SETTLED_S
    while open_ or await bus_messages(bus, REQUESTS.name):
        assert loop.time() < give_up_s, f"not closed: {sorted(open_)}"
        await asyncio.sleep(0.05)
    await watch.close()


async def holds_nothing(bus: JetStreamBus, workers: list[str]) -> None:
    """No worker has a sequence, a KV cell, a slot or a transfer."""
    loads: dict[str, WorkerLoad] = {}

    def note(delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        loads[load.worker] = load

    heard = await bus.subscribe(subjects.LOADS, note)
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + SETTLED_S
    while not (set(workers) <= loads.keys() and all(map(idle, loads.values()))):
        assert loop.time() < give_up_s, f"still held: {loads}"
        await asyncio.sleep(0.05)
    await heard.close()
    for worker in workers:
        kv: KvSnapshot = await bus.request(
            subjects.control(worker),
            KvAsk(),
            KvSnapshot,
            timeout_s=60.0,  # type: ignore[arg-type]
        )
        assert (kv.slots_used, kv.transfers) == (0, ())


def idle(load: WorkerLoad) -> bool:
    held = (load.running, load.waiting, load.kv_tokens_used, load.transfer_slots_used)
    return held == (0, 0, 0, 0)


async def keeps_no_open_record(bus: JetStreamBus) -> None:
    """What the bucket still holds is closed, and goes by itself."""
    records: list[RequestRecord] = []

    def note(change: Kept[RequestRecord] | Gone) -> None:
        if isinstance(change, Kept):
            records.append(change.value)

    watch = await bus.bucket(REQUEST_RECORDS, RequestRecord).watch(note)
    await watch.close()
    assert {record.state for record in records} == {RecordState.CLOSED}
    assert len(records) <= REQUESTS_IN_ALL
    for record in Random(0).sample(records, 20):
        body = {"last_by_subj": f"$KV.{REQUEST_RECORDS.name}.{record.request_id}"}
        found = await api(
            bus._connection, f"STREAM.MSG.GET.KV_{REQUEST_RECORDS.name}", body, timeout_s=60.0
        )
        headers = base64.b64decode(found["message"]["hdrs"]).decode()
        ttl = re.search(r"Nats-TTL: ?(\d+)", headers)
        assert ttl is not None, headers
        assert int(ttl[1]) == RESUME_WINDOW_S


async def bus_messages(bus: JetStreamBus, stream: str) -> int:
    """How many messages a stream holds."""
    info = await api(bus._connection, f"STREAM.INFO.{stream}", {}, timeout_s=60.0)
    return int(info["state"]["messages"])


async def metrics_of(process: Process) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"http://127.0.0.1:{process.health_port}/metrics")
    plain = (line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in plain}

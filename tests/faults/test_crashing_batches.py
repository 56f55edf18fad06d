"""A gateway that runs a batch stops between two of its steps; another takes the batch over.

One test per crash point. Whatever happened, each line has one result, the undisturbed one, and no
line ran twice.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from diptych_bus.port import Bucket
from diptych_contracts.batches import BatchRecord, BatchState, LineResult, StoredFile
from diptych_contracts.errors import Conflict
from diptych_contracts.fleet import Role
from diptych_contracts.idempotency import Claim, ClaimState
from diptych_contracts.requests import Request, RequestRecord
from diptych_contracts.streams import BATCHES, REQUEST_RECORDS
from diptych_gateway.batches import owning as batch_owning
from diptych_gateway.batches import running as batch_running
from diptych_gateway.idempotency import joining
from diptych_testkit.builders import MODEL
from diptych_testkit.cut_fleet import CutFleet, cut_fleet, slow_engine
from diptych_testkit.interruptions import Call, Cut
from diptych_testkit.small_gateway import VOCAB_SIZE, SmallGateway, small_gateway

CHAT = "/v1/chat/completions"
LINES, TOKENS = 6, 20


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is dead is given up soon."""
    monkeypatch.setattr(joining, "_GIVE_UP_S", 0.3)
    monkeypatch.setattr(batch_owning, "LEASE_S", 1.0)
    monkeypatch.setattr(batch_running, "RENEW_S", 0.2)


def body(number: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"Hello {number}"}]
    return {"model": MODEL, "messages": said, "max_tokens": TOKENS, "temperature": 0}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[CutFleet, SmallGateway, SmallGateway]]:
    async with cut_fleet() as case:
        case.fleet.scheduler("s1")
        case.fleet.worker("p1", Role.PREFILL, engine=slow_engine(vocab_size=VOCAB_SIZE))
        case.fleet.worker("d1", Role.DECODE, engine=slow_engine(vocab_size=VOCAB_SIZE))
        await case.fleet.ready()
        async with (
            small_gateway(case.fleet, "g1", batch_in_flight=2, accept_s=(0.5,)) as g1,
            small_gateway(case.fleet, "g2", batches_at_once=0) as g2,
        ):
            yield case, g1, g2


async def start(gateway: SmallGateway) -> str:
    """A batch, created by way of `gateway`."""
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": body(n)} for n in range(LINES)
    ]
    file = await gateway.client.post(
        "/v1/files",
        files={"file": ("in.jsonl", b"\n".join(json.dumps(line).encode() for line in lines))},
        data={"purpose": "batch"},
    )
    made = await gateway.client.post(
        "/v1/batches",
        json={
            "input_file_id": file.json()["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        },
    )
    assert made.status_code == 200, made.text
    batch_id: str = made.json()["id"]
    return batch_id


async def undisturbed(gateway: SmallGateway) -> dict[str, str]:
    texts = {}
    for number in range(LINES):
        answer = await gateway.post(CHAT, body(number))
        texts[f"c{number}"] = answer.json()["choices"][0]["message"]["content"]
    return texts


async def ran(case: CutFleet) -> int:
    """How many requests were given to workers."""
    bucket = case.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    found = [await bucket.get(key) for key in list(case.broker.bucket(REQUEST_RECORDS).values)]
    return sum(kept is not None and kept.value.assignment is not None for kept in found)


async def results(gateway: SmallGateway, batch_id: str) -> dict[str, str]:
    async with asyncio.timeout(60):
        while True:
            batch = (await gateway.client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] not in ("validating", "in_progress", "finalizing"):
                break
            await asyncio.sleep(0.05)
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    content = await gateway.client.get(f"/v1/files/{batch['output_file_id']}/content")
    lines = [json.loads(line) for line in content.text.splitlines()]
    assert Counter(line["custom_id"] for line in lines) == Counter(f"c{n}" for n in range(LINES))
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }


def writes(state: BatchState) -> Any:
    return lambda call: call.is_a(BatchRecord, kind="update") and call.message.state is state


def claims(state: ClaimState) -> Any:
    return lambda call: call.is_a(Claim) and call.message.state is state


def stores_request(call: Call) -> bool:
    return call.is_a(Request, kind="store")


def keeps_result(call: Call) -> bool:
    return call.is_a(LineResult, kind="put")


def describes_file(call: Call) -> bool:
    return call.is_a(StoredFile, kind="create")


def drops_result(call: Call) -> bool:
    return call.kind == "delete" and call.subject.startswith("batch-results/")


PLACES = {
    "taken-over": (writes(BatchState.VALIDATING), 1),
    "validated": (writes(BatchState.IN_PROGRESS), 1),
    "claimed": (claims(ClaimState.CLAIMED), 3),
    "stored": (stores_request, 3),
    "marked": (claims(ClaimState.STORED), 3),
    "result": (keeps_result, 3),
    "finalizing": (writes(BatchState.FINALIZING), 1),
    "file": (describes_file, 1),
    "completed": (writes(BatchState.COMPLETED), 1),
    "tidied": (drops_result, 3),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_batch_outlives_its_gateway(place: str, after: bool) -> None:
    async with served() as (case, g1, g2):
        expected = await undisturbed(g2)
        before = await ran(case)
        where, nth = PLACES[place]
        stop = case.broker.kill_after if after else case.broker.kill_before
        cut: Cut = stop("g1", where, nth=nth)
        batch_id = await start(g2)
        async with asyncio.timeout(60):
            await cut.reached.wait()
        await g1.kill()
        async with small_gateway(case.fleet, "g3", batch_in_flight=2) as g3:
            assert await results(g3, batch_id) == expected
            assert await ran(case) == before + LINES
            await case.fleet.settled()


async def stolen(records: Bucket[BatchRecord], batch_id: str, owner: SmallGateway) -> None:
    """Have nobody own it, though its owner renews it at any moment."""
    while True:
        kept = await records.get(batch_id)
        assert kept is not None
        assert kept.value.owner == owner.incarnation
        free = msgspec.structs.replace(kept.value, owner=None, owned_until_unix_ms=0)
        with contextlib.suppress(Conflict):
            await records.update(batch_id, free, kept.revision)
            return


async def test_two_gateways_that_both_run_a_batch_run_no_line_twice() -> None:
    """As when one of them was frozen, and does not know yet that it lost its lease."""
    async with served() as (case, g1, g2):
        expected = await undisturbed(g2)
        before = await ran(case)
        batch_id = await start(g2)
        async with asyncio.timeout(60):
            while await ran(case) < before + 2:
                await asyncio.sleep(0.01)
        records = case.fleet.bus.bucket(BATCHES, BatchRecord)
        await stolen(records, batch_id, g1)
        async with small_gateway(case.fleet, "g3", batch_in_flight=2) as g3:
            assert await results(g3, batch_id) == expected
        assert await ran(case) == before + LINES

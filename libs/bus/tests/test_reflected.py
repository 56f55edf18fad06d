"""A reader has the server send what it may not say itself: nobody believes it.

NATS does not check the reply subject of a question: a direct read answers wherever it is told to.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych_bus.jetstream.client import IdentifiedClient
from diptych_bus.port import Gone, Kept
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation
from diptych_contracts.streams import KEYS, WORKERS
from diptych_contracts.wire import encode
from diptych_identity.roles import Role
from diptych_testkit.guarded_nats import GuardedNats, guarded_nats

THIEF = "decode-worker-666"
MINE = f"$KV.{WORKERS.name}.{THIEF}"


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[GuardedNats]:
    with guarded_nats(tmp_path) as nats:
        yield nats


async def reflect(thief: IdentifiedClient, to: str) -> None:
    """Have the server send the thief's own registration to `to`."""
    await thief.publish(f"$JS.API.DIRECT.GET.KV_{WORKERS.name}.{MINE}", b"", reply=to)
    await thief.flush()


async def planted(nats: GuardedNats) -> IdentifiedClient:
    thief = await nats.client(Role.DECODE_WORKER, THIEF)
    forged = Beat(member=Incarnation("power-governor-1"), service="power-governor", count=1)
    await thief.request(MINE, encode(forged), timeout=60)
    return thief


async def test_in_a_bucket_it_is_as_if_it_were_not_there(
    nats: GuardedNats, caplog: pytest.LogCaptureFixture
) -> None:
    thief, bus = await planted(nats), await nats.join()
    bucket = bus.bucket(KEYS, Beat)
    told: list[Kept[Beat] | Gone] = []
    watch = await bucket.watch(told.append)
    genuine = Beat(member=Incarnation("me"), service="s", count=1)
    await bucket.put("key.good", genuine)
    await reflect(thief, f"$KV.{KEYS.name}.key.evil")
    await bucket.put("key.last", genuine)
    async with asyncio.timeout(60):
        while len(told) < 2 or "bus_reflected_message_refused" not in caplog.text:
            await asyncio.sleep(0.01)  # the server may answer a direct read after what came later

    assert [change.key for change in told] == ["key.good", "key.last"]
    assert await bucket.get("key.evil") is None
    assert {kept.key for kept in await bucket.values()} == {"key.good", "key.last"}
    await watch.close()
    await bus.close()
    await thief.close()


async def test_on_a_subject_nobody_hears_it(nats: GuardedNats) -> None:
    thief, bus = await planted(nats), await nats.join()
    heard: list[str] = []
    await bus.subscribe("power.*", lambda delivery: heard.append(delivery.subject))
    await reflect(thief, "power.decode-worker-1")
    await bus.publish("power.decode-worker-2", Beat(member=Incarnation("g"), service="g", count=1))
    async with asyncio.timeout(60):
        while not heard:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert heard == ["power.decode-worker-2"]
    await bus.close()
    await thief.close()

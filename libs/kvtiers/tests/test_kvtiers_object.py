import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych_contracts.errors import BusAway, Permanent, StoreFull, Transient
from diptych_contracts.streams import KV_BLOCKS
from diptych_kvtiers.bus_tier import BusTier
from diptych_kvtiers.host_tier import HostTier
from diptych_kvtiers.object_tier import ObjectTier
from diptych_kvtiers.opening import make_tiers
from diptych_kvtiers.port import TierAway, TierFull
from diptych_kvtiers.specs import parse_tiers
from diptych_kvtiers.stack import StackLimits, TierStack
from diptych_testkit.ports import free_port
from diptych_testkit.tier_suite import WAIT_S, check_tier, tier_block, tier_key

KEYS = [tier_key(n) for n in range(20)]


class Objects:
    """The bus's object store, in memory; told to, it fails."""

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self.held: dict[str, bytes] = {}
        self.limit_bytes = limit_bytes
        self.fails: Exception | None = None

    def _obey(self, bucket: str) -> None:
        assert bucket == KV_BLOCKS
        if self.fails is not None:
            raise self.fails

    async def put_object(self, bucket: str, name: str, data: bytes) -> None:
        self._obey(bucket)
        if sum(map(len, self.held.values())) + len(data) > self.limit_bytes:
            raise StoreFull("maximum bytes exceeded")
        self.held[name] = data

    async def get_object(self, bucket: str, name: str) -> bytes | None:
        self._obey(bucket)
        return self.held.get(name)

    async def delete_object(self, bucket: str, name: str) -> None:
        self._obey(bucket)
        self.held.pop(name, None)

    async def object_names(self, bucket: str) -> list[str]:
        self._obey(bucket)
        return list(self.held)


async def test_the_bus_is_a_tier() -> None:
    tier = BusTier(Objects(), 1 << 30)
    await tier.open()
    await check_tier(tier)


async def test_the_bus_keeps_to_its_budget() -> None:
    objects = Objects()
    tier = BusTier(objects, 1_000_000)
    await tier.open()
    for n in range(15):
        await tier.put(KEYS[n], tier_block(n))
    await tier.tend()
    assert len(objects.held) == 10
    assert [await tier.get(key) is None for key in KEYS[:6]] == [True] * 5 + [False]
    assert tier.usage().evicted == 5
    with pytest.raises(TierFull):
        await tier.put(KEYS[15], bytes(1_000_001))


async def test_a_full_bucket_makes_room_once() -> None:
    objects = Objects(limit_bytes=1_000_000)
    tier = BusTier(objects, 1 << 30)
    await tier.open()
    for n in range(20):
        await tier.put(KEYS[n], tier_block(n))
    assert await tier.get(KEYS[19]) == tier_block(19)
    objects.limit_bytes = 0
    with pytest.raises(TierFull):
        await tier.put(KEYS[0], tier_block(0))


async def test_a_listing_that_is_stale_is_a_miss() -> None:
    objects = Objects()
    tier = BusTier(objects, 1 << 30)
    await tier.put(KEYS[0], tier_block(0))
    objects.held.clear()
    assert list(await tier.sizes(KEYS)) in ([], [100_000])
    assert await tier.get(KEYS[0]) is None


async def test_a_bus_that_is_away_is_away_and_a_torn_object_a_miss() -> None:
    objects = Objects()
    tier = BusTier(objects, 1 << 30)
    await tier.put(KEYS[0], tier_block(0))
    objects.fails = BusAway("no answer")
    for call in (tier.get(KEYS[0]), tier.put(KEYS[0], b"x"), tier.tend(), tier.forget("0" * 32)):
        with pytest.raises(TierAway):
            await call
    objects.fails = Transient("object is incomplete or altered")
    assert await tier.get(KEYS[0]) is None


@pytest.mark.parametrize("scheme", ["memory", "file"])
async def test_an_object_store_is_a_tier(tmp_path: Path, scheme: str) -> None:
    tier = ObjectTier("memory:///" if scheme == "memory" else f"file://{tmp_path}/kv")
    await tier.open()
    await check_tier(tier)
    await tier.close()


async def test_an_object_store_keeps_to_its_budget(tmp_path: Path) -> None:
    tier = ObjectTier(f"file://{tmp_path}/kv", budget_bytes=1_000_000)
    await tier.open()
    for n in range(15):
        await tier.put(KEYS[n], tier_block(n))
        path = tmp_path / "kv" / KEYS[n].tenant_tag / KEYS[n].block
        os.utime(path, (1000 + n, 1000 + n))
    await tier.tend()
    usage = tier.usage()
    assert (usage.entries, usage.bytes, usage.evicted) == (9, 900_000, 6)
    assert [await tier.get(key) is None for key in KEYS[:7]] == [True] * 6 + [False]


async def test_a_directory_that_cannot_be_written_is_away(tmp_path: Path) -> None:
    tier = ObjectTier(f"file://{tmp_path}/kv")
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("a file in its place")
    with pytest.raises(TierAway):
        await tier.put(KEYS[0], tier_block(0))


async def test_a_store_that_nobody_serves_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    endpoint = f"http://127.0.0.1:{free_port()}"
    tier = ObjectTier("s3://bucket/kv", endpoint=endpoint, region="us-east-1", timeout_s=2.0)
    for call in (tier.open(), tier.get(KEYS[0]), tier.put(KEYS[0], b"x"), tier.sizes(KEYS)):
        with pytest.raises(TierAway):
            await call


async def test_a_store_that_hangs_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    over = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        tier = ObjectTier("s3://b/kv", endpoint=f"http://127.0.0.1:{port}", timeout_s=0.2)
        stack = TierStack([HostTier(1 << 20), tier], limits=StackLimits(start_s=WAIT_S))
        await stack.start()
        assert await stack.read(KEYS, timeout_s=WAIT_S) == []
        with pytest.raises(TierAway):
            await tier.get(KEYS[0])
        over.set()
        await stack.close()


async def test_tiers_as_a_setting_names_them(tmp_path: Path) -> None:
    text = (
        f"host:2MiB,disk:20MiB:{tmp_path}/d,redis://u:hush@127.0.0.1:1?timeout=0.1,"
        f"memcached://127.0.0.1:1?timeout=0.1,file://{tmp_path}/o?budget=10MiB,bus:1GiB"
    )
    tiers = make_tiers(parse_tiers(text.split(",")), bus=Objects())
    assert [tier.name for tier in tiers] == [
        "host",
        f"disk:{tmp_path}/d",
        "redis://127.0.0.1:1",
        "memcached://127.0.0.1:1",
        f"file://{tmp_path}/o",
        "bus",
    ]
    stack = TierStack(tiers, limits=StackLimits(start_s=WAIT_S, find_s=WAIT_S))
    await stack.start()
    for n in range(3):
        stack.put(KEYS[n], tier_block(n))
    assert await stack.flush(WAIT_S)
    away = {usage.name for usage in stack.usage() if usage.away}
    assert away == {"redis://127.0.0.1:1", "memcached://127.0.0.1:1"}
    got = await stack.read(KEYS, timeout_s=WAIT_S)
    assert [bytes(block) for block in got] == [tier_block(n) for n in range(3)]
    forgotten = await stack.forget(KEYS[0].tenant_tag)
    assert (forgotten.entries, set(forgotten.unreachable)) == (3, away)
    assert "hush" not in repr(stack.usage())
    await stack.close()


def test_what_a_store_needs_is_said_when_it_is_made() -> None:
    with pytest.raises(Permanent, match="a tier of kind object: az://"):
        make_tiers(parse_tiers(["az://x"]), bus=Objects())


_WITHOUT = """
import sys
for name in ("obstore", "redis", "pymemcache"):
    sys.modules[name] = None
from diptych_contracts.errors import Permanent
from diptych_kvtiers.opening import make_tiers
from diptych_kvtiers.specs import parse_tiers
import diptych_kvtiers.stack
make_tiers(parse_tiers(["host:1GiB", "disk:1GiB:/x", "bus:1GiB"]), bus=None)
for text in ("redis://h", "memcached://h:1", "s3://b"):
    try:
        make_tiers(parse_tiers([text]), bus=None)
    except Permanent as err:
        print(err)
"""


def test_without_the_extra_there_are_memory_disk_and_bus() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 3
    assert all("pip install 'diptych[tiers]'" in line for line in lines)

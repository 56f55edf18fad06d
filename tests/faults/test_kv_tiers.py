"""KV that outlives its worker: restored by the next one, and never the reason of a failure."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from diptych_chassis.orders import Orders
from diptych_contracts import subjects
from diptych_contracts.control import (
    ForgetAnswer,
    ForgetTenant,
    KvAsk,
    KvSnapshot,
    TenantForgotten,
    TiersAsk,
    TiersSnapshot,
)
from diptych_contracts.errors import TierAway, TierFull
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason, Report
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.sampling import Sampling, Stopping
from diptych_contracts.tiers import TierKey
from diptych_kvtiers.disk_tier import DiskTier
from diptych_kvtiers.host_tier import HostTier
from diptych_kvtiers.port import Entry
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import GREEDY, ToyStepEngine, toy_answer

PROMPT = tuple(range(1, 301))
WHOLE = 256
"""Tokens of its full blocks."""
WAIT_S = 60.0
SEEDED = Sampling(temperature=1.0, seed=5)
REMOTE, LOCAL = Forced(mode=Mode.REMOTE), Forced(mode=Mode.LOCAL)


class FailingTier(HostTier):
    """Memory that outlives its worker, until it is told how to fail."""

    timeout_s = WAIT_S

    def __init__(self) -> None:
        super().__init__(64 * 1024 * 1024)
        self.fails: Callable[[str], None] = lambda _verb: None

    async def sizes(self, keys: Sequence[TierKey]) -> Sequence[int]:
        self.fails("sizes")
        return await super().sizes(keys)

    async def get(self, key: TierKey) -> Entry | None:
        self.fails("get")
        return await super().get(key)

    async def put(self, key: TierKey, data: Entry) -> None:
        self.fails("put")
        await super().put(key, data)

    async def close(self) -> None:
        """Nothing is forgotten."""


async def start(fleet: SmallFleet, name: str, role: Role, **more: object) -> None:
    engine = ToyStepEngine(prefix_sequences=4)
    fleet.worker(name, role, engine=engine, kv_restore="always", **more)
    await fleet.ready(name)


async def ask(
    fleet: SmallFleet,
    name: str,
    *,
    forced: Forced = REMOTE,
    tenant: str = "default",
    prompt: tuple[int, ...] = PROMPT,
    sampling: Sampling = GREEDY,
) -> Report:
    """Ask, and see that the answer is the one that a lone engine gives."""
    await fleet.client.send(
        a_request(
            name,
            prompt_ids=prompt,
            stopping=Stopping(max_tokens=8),
            forced=forced,
            tenant=tenant,
            sampling=sampling,
        )
    )
    end = await fleet.client.ended(name)
    assert end.reason is EndReason.LENGTH
    assert fleet.client.delivered[name] == toy_answer(prompt, 8, sampling=sampling)
    assert end.report is not None
    return end.report


async def tiers(fleet: SmallFleet, worker: str) -> TiersSnapshot:
    subject = subjects.control(fleet.incarnation(worker))
    snapshot: TiersSnapshot = await fleet.bus.request(
        subject, TiersAsk(), TiersSnapshot, timeout_s=5
    )
    return snapshot


async def until_stored(fleet: SmallFleet, worker: str, blocks: int, tier: int = 0) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await tiers(fleet, worker)).tiers[tier].stored < blocks:
            await asyncio.sleep(0.01)


def on_disk(folder: Path) -> dict[str, object]:
    """A tier of files, that is not taken for away because the machine is busy."""
    return {"tiers": (DiskTier(folder, 64 * 1024 * 1024, timeout_s=WAIT_S),)}


async def forgotten(fleet: SmallFleet, worker: str, tenant: str) -> TenantForgotten:
    orders = Orders(Incarnation("op"), "operator", unix_ms=fleet.bus.unix_ms, identity=None)
    subject = subjects.control(fleet.incarnation(worker))
    signed = orders.signed(
        subject, ForgetTenant(tenant=tenant), epoch=time.time_ns(), valid_ms=30_000
    )
    answer: ForgetAnswer = await fleet.bus.request(subject, signed, ForgetAnswer, timeout_s=10)
    assert isinstance(answer, TenantForgotten)
    return answer


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_worker_that_comes_anew_restores_what_its_predecessor_wrote(
    mode: Mode, sampling: Sampling, tmp_path: Path
) -> None:
    forced, (role, other) = Forced(mode=mode), (Role.PREFILL, Role.DECODE)
    if mode is Mode.LOCAL:
        role = Role.DECODE
    async with small_fleet() as fleet:
        fleet.scheduler()
        if mode is Mode.REMOTE:
            await start(fleet, "other", other)
        await start(fleet, "w1", role, **on_disk(tmp_path))
        for name in ("first", "second"):  # a block is written at its second sighting
            assert (await tiers(fleet, "w1")).tiers[0].stored == 0
            await ask(fleet, name, forced=forced, sampling=sampling)
        await until_stored(fleet, "w1", 4)
        await fleet.kill("w1")
        await start(fleet, "w2", role, **on_disk(tmp_path))
        third = await ask(fleet, "third", forced=forced, sampling=sampling)
        assert third.cached_tokens == WHOLE
        told = await tiers(fleet, "w2")
        assert (told.restored, told.restored_tokens) == (1, WHOLE)
        assert told.tiers[0].hits == 4
        longer = await ask(fleet, "longer", prompt=(*PROMPT, *range(500, 600)), forced=forced)
        assert longer.cached_tokens == WHOLE  # by now of the engine's own prefix cache
        assert (await tiers(fleet, "w2")).restored == 1
        await fleet.settled()


async def test_no_tenant_is_given_what_another_wrote(tmp_path: Path) -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await start(fleet, "d1", Role.DECODE)
        await start(fleet, "p1", Role.PREFILL, **on_disk(tmp_path))
        for name in ("first", "second"):
            await ask(fleet, name, tenant="ours")
        await until_stored(fleet, "p1", 4)
        await fleet.kill("p1")
        await start(fleet, "p2", Role.PREFILL, **on_disk(tmp_path))
        assert (await ask(fleet, "theirs", tenant="theirs")).cached_tokens == 0
        assert (await ask(fleet, "ours", tenant="ours")).cached_tokens == WHOLE


async def test_a_purged_tenants_blocks_are_gone_and_the_others_stay(tmp_path: Path) -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await start(fleet, "d1", Role.DECODE)
        await start(fleet, "p1", Role.PREFILL, **on_disk(tmp_path))
        for name in ("first", "second"):
            for tenant in ("gone", "stays"):
                await ask(fleet, f"{name}-{tenant}", tenant=tenant)
        await until_stored(fleet, "p1", 8)
        told = await forgotten(fleet, "p1", "gone")
        assert (told.tier_entries, told.tiers_away) == (4, ())
        assert (await tiers(fleet, "p1")).tiers[0].entries == 4
        await fleet.kill("p1")
        await start(fleet, "p2", Role.PREFILL, **on_disk(tmp_path))
        assert (await ask(fleet, "gone", tenant="gone")).cached_tokens == 0
        assert (await ask(fleet, "stays", tenant="stays")).cached_tokens == WHOLE


async def test_corrupt_files_are_misses_and_are_written_anew(tmp_path: Path) -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await start(fleet, "d1", Role.DECODE)
        await start(fleet, "p1", Role.PREFILL, **on_disk(tmp_path))
        for name in ("first", "second"):
            await ask(fleet, name)
        await until_stored(fleet, "p1", 4)
        await fleet.kill("p1")
        assert spoil(tmp_path) == 4
        await start(fleet, "p2", Role.PREFILL, **on_disk(tmp_path))
        assert (await ask(fleet, "third")).cached_tokens == 0
        usage = (await tiers(fleet, "p2")).tiers[0]
        assert usage.corrupt >= 1
        await fleet.settled()


def spoil(folder: Path) -> int:
    """Flip a bit in each entry; gives how many there were."""
    spoilt = 0
    for path in (path for path in folder.rglob("*") if path.is_file()):
        data = bytearray(path.read_bytes())
        if len(data) > 200:  # an entry of 268 bytes and its frame
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
            spoilt += 1
    return spoilt


FAILURES = {
    "crashed": TierAway("connection refused"),
    "full": TierFull("no space left on device"),
    "a bug": RuntimeError("list index out of range"),
}


@pytest.mark.parametrize("verbs", [("sizes", "get"), ("get",), ("put",)], ids=" ".join)
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_tier_that_fails_costs_nobody_an_answer(
    failure: str, verbs: tuple[str, ...]
) -> None:
    tier = FailingTier()
    async with small_fleet() as fleet:
        fleet.scheduler()
        await start(fleet, "d1", Role.DECODE)
        await start(fleet, "p1", Role.PREFILL, tiers=(tier,))
        for name in ("first", "second"):
            await ask(fleet, name)
        await until_stored(fleet, "p1", 4)
        await fleet.kill("p1")

        def fails(verb: str) -> None:
            if verb in verbs:
                raise FAILURES[failure]

        tier.fails = fails
        await start(fleet, "p2", Role.PREFILL, tiers=(tier,))
        third = await ask(fleet, "third")
        assert third.cached_tokens == (WHOLE if verbs == ("put",) else 0)
        await ask(fleet, "other", prompt=PROMPT[::-1])
        await ask(fleet, "another", prompt=PROMPT[::-1])
        await fleet.settled()
        assert fleet.crashes == []


async def test_a_tier_that_hangs_keeps_a_prompt_no_longer_than_it_may() -> None:
    tier = FailingTier()
    tier.timeout_s = 0.1

    async def hang(_keys: Sequence[TierKey]) -> Sequence[int]:
        await asyncio.Event().wait()
        raise AssertionError

    tier.sizes = hang  # type: ignore[method-assign]
    async with small_fleet() as fleet:
        fleet.scheduler()
        await start(fleet, "d1", Role.DECODE)
        await start(fleet, "p1", Role.PREFILL, tiers=(tier,))
        for name in ("first", "second", "third"):
            await ask(fleet, name)
        assert (await tiers(fleet, "p1")).restored == 0
        await fleet.settled()


async def test_a_worker_without_tiers_says_so() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await start(fleet, "d1", Role.DECODE)
        assert (await tiers(fleet, "d1")).tiers == ()


async def test_blocks_that_the_decode_worker_has_are_kept_in_tiers_all_the_same() -> None:
    async with small_fleet() as fleet:
        fleet.scheduler()
        await start(fleet, "p1", Role.PREFILL, kv_tiers=("host:64MiB",), kv_tier_sightings=2)
        await start(fleet, "d1", Role.DECODE, kv_reuse=True)
        await ask(fleet, "first")
        await ask(fleet, "second")
        await until_stored(fleet, "p1", len(PROMPT) // 64)
        subject = subjects.control(fleet.incarnation("d1"))
        about = KvAsk(ended=8, about="second")
        told = await fleet.bus.request(subject, about, KvSnapshot, timeout_s=5)
        assert [t.held_blocks for t in told.transfers] == [(len(PROMPT) - 1) // 64]
        await fleet.settled()

import asyncio
from random import Random
from typing import Any

import pytest

from diptych_bus.memory import MemoryBroker
from diptych_bus.port import Bus, Delivery
from diptych_chassis.member import Member
from diptych_chassis.settings import BadSettings, parse_settings
from diptych_contracts import subjects
from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.errors import BusAway
from diptych_contracts.fleet import Role, WorkerLoad, WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_contracts.orders import Order, Signed
from diptych_contracts.power import GovernorLease, PowerSetPoint
from diptych_contracts.streams import LEASES, WORKERS
from diptych_contracts.wire import decode
from diptych_power_governor.app import serve
from diptych_power_governor.leading import KEY, Leadership
from diptych_power_governor.settings import GovernorSettings

WORKER = Incarnation("prefill-worker-1")
FAST = GovernorSettings(budget_w=400.0, tick_s=0.01, lease_s=10.0)


class Clock:
    """Monotonic time that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def registration() -> WorkerRegistration:
    layout = KvLayout(layout_id="x", engine_build="x", block_tokens=1, slot_bytes=1, dtype="f16")
    return WorkerRegistration(
        worker=WORKER,
        role=Role.PREFILL,
        engine="x",
        model="m",
        fingerprint=Fingerprint(base="b", weights="w"),
        layout=layout,
        endpoints=(),
        max_sequences=1,
        kv_tokens=1,
        context_tokens=1,
        cap_min_w=200.0,
        cap_default_w=700.0,
    )


def member(broker: MemoryBroker, name: str, clock: Any = None) -> Member:
    fields = {} if clock is None else {"clock": clock}
    return Member(
        service="power-governor",
        incarnation=Incarnation(name),
        bus=broker.connect(name),
        rng=Random(1),
        **fields,
    )


async def watch_set_points(bus: Bus) -> list[PowerSetPoint]:
    seen: list[PowerSetPoint] = []

    def note(delivery: Delivery) -> None:
        signed: Signed = delivery.decode(Signed)
        seen.append(decode(decode(signed.content, Order).body, PowerSetPoint))

    await bus.subscribe(subjects.power(WORKER), note)
    return seen


async def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


async def test_a_worker_gets_leased_set_points_and_the_key_is_let_go_at_the_end() -> None:
    broker = MemoryBroker()
    bus = broker.connect("worker")
    seen = await watch_set_points(bus)
    await bus.bucket(WORKERS, WorkerRegistration).put(WORKER, registration())
    governor = member(broker, "power-governor-1")

    running = asyncio.create_task(serve(governor, FAST))
    await bus.publish(subjects.load(WORKER), WorkerLoad(worker=WORKER, cap_w=700.0))
    await until(lambda: seen)
    governor.stopping.set()
    await running

    assert seen[0] == PowerSetPoint(
        governor=governor.incarnation, worker=WORKER, sequence=1, cap_w=400.0, lease_ms=10_000
    )
    assert await bus.bucket(LEASES, GovernorLease).get(KEY) is None


async def test_a_second_governor_waits_and_takes_over() -> None:
    broker = MemoryBroker()
    bus = broker.connect("worker")
    seen = await watch_set_points(bus)
    await bus.bucket(WORKERS, WorkerRegistration).put(WORKER, registration())
    first, second = member(broker, "power-governor-1"), member(broker, "power-governor-2")

    running = [asyncio.create_task(serve(first, FAST))]
    await until(lambda: seen)
    running.append(asyncio.create_task(serve(second, FAST)))
    await asyncio.sleep(0.05)
    assert {point.governor for point in seen} == {"power-governor-1"}

    first.stopping.set()
    await until(lambda: seen[-1].governor == "power-governor-2")
    second.stopping.set()
    await asyncio.gather(*running)


def leadership(bus: Bus, name: str, clock: Clock) -> Leadership:
    bucket = bus.bucket(LEASES, GovernorLease)
    return Leadership(bucket, Incarnation(name), ttl_s=10.0, now_s=clock)


async def test_one_holds_the_key_until_it_is_let_go() -> None:
    clock, bus = Clock(), MemoryBroker().connect("x")
    first, second = leadership(bus, "g1", clock), leadership(bus, "g2", clock)

    assert await first.hold()
    assert not await second.hold()
    clock.now_s += 4
    assert await first.hold()
    assert not await second.hold()

    await first.let_go()
    assert not first.held
    assert await second.hold()


async def test_the_epoch_rises_from_governor_to_governor_and_stays_while_one_leads() -> None:
    """What a predecessor signed is refused by it, even if this one counts from one again."""
    clock, bus = Clock(), MemoryBroker().connect("x")
    epochs: list[int] = []
    for name in ("g1", "g2", "g1-restarted"):
        leads = leadership(bus, name, clock)
        assert await leads.hold()
        epochs.append(leads.epoch)
        clock.now_s += 4
        assert await leads.hold()
        assert leads.epoch == epochs[-1]
        await leads.let_go()
    assert 0 < epochs[0] < epochs[1] < epochs[2]


async def test_a_thawed_governor_sees_that_it_was_succeeded_before_it_acts() -> None:
    clock, bus = Clock(), MemoryBroker().connect("x")
    frozen, next_one = leadership(bus, "g1", clock), leadership(bus, "g2", clock)
    await frozen.hold()

    await bus.bucket(LEASES, GovernorLease).delete(KEY)
    assert await next_one.hold()
    clock.now_s += 30

    assert not frozen.held
    assert not await frozen.hold()


async def test_a_write_it_never_heard_of_is_its_own() -> None:
    clock, bus = Clock(), MemoryBroker().connect("x")
    lease = GovernorLease(governor=Incarnation("g1"))
    await bus.bucket(LEASES, GovernorLease).create(KEY, lease)
    governor = leadership(bus, "g1", clock)

    await governor.hold()

    assert await governor.hold()


async def test_while_the_bus_is_away_only_a_confirmed_hold_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, bus = Clock(), MemoryBroker().connect("x")
    bucket = bus.bucket(LEASES, GovernorLease)
    governor = Leadership(bucket, Incarnation("g1"), ttl_s=10.0, now_s=clock)
    await governor.hold()

    async def away(*_: object, **__: object) -> int:
        raise BusAway("no server")

    monkeypatch.setattr(bucket, "update", away)
    clock.now_s += 9.9
    assert await governor.hold()
    clock.now_s += 0.2
    assert not await governor.hold()


def test_settings_come_from_the_environment() -> None:
    environ = {"DIPTYCH_POWER_GOVERNOR__BUDGET_W": "1200", "DIPTYCH_POWER_GOVERNOR__TICK_S": "2"}

    settings = parse_settings(GovernorSettings, "power-governor", environ)

    assert (settings.budget_w, settings.tick_s, settings.lease_s) == (1200.0, 2.0, 10.0)


@pytest.mark.parametrize(("name", "value"), [("BUDGET_W", "-1"), ("LEASE_S", "2"), ("TICK_S", "0")])
def test_settings_that_make_no_sense_are_named(name: str, value: str) -> None:
    with pytest.raises(BadSettings, match=name):
        parse_settings(
            GovernorSettings, "power-governor", {f"DIPTYCH_POWER_GOVERNOR__{name}": value}
        )

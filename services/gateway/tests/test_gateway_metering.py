"""Use, summed from events by several gateways at once: each event counts once."""

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_contracts import subjects
from diptych_contracts.events import RequestEnded
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import End, EndReason, Report
from diptych_contracts.streams import USAGE
from diptych_contracts.usage import CURSOR, UsageDay, UsageEntry, usage_key
from diptych_gateway.tenancy import metering
from diptych_gateway.tenancy.metering import Metering
from diptych_telemetry import metrics


async def end(bus: MemoryBus, number: int, tenant: str = "acme") -> None:
    request_id = RequestId(f"{number:032x}")
    report = Report(decode_ms=1000, decode_j=2.0, cached_tokens=3)
    event = RequestEnded(
        request_id=request_id,
        end=End(request_id=request_id, attempt=1, reason=EndReason.STOP, report=report),
        tenant=tenant,
        prompt_tokens=10,
        answer_tokens=4,
    )
    subject = subjects.event("request_ended")
    await bus.store(subject, event, msg_id=f"{request_id}.end", timeout_s=60)


async def day_of(bus: Any, tenant: str) -> UsageDay:
    bucket = bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry)))
    day = datetime.fromtimestamp(bus.unix_ms() / 1000, UTC).date().isoformat()
    kept = await bucket.get(usage_key(day, tenant))
    assert kept is not None
    assert isinstance(kept.value, UsageDay)
    return kept.value


async def test_each_ended_request_is_counted_once() -> None:
    bus = MemoryBroker().connect("g")
    for number in range(5):
        await end(bus, number)
    await end(bus, 9, "rival")
    meter = Metering(bus)
    for _ in range(3):
        await meter.catch_up()
    used = (await day_of(bus, "acme")).used
    assert (used.requests, used.prompt_tokens, used.cached_tokens) == (5, 50, 15)
    assert (used.answer_tokens, used.kv_token_s, used.decode_j) == (20, 60.0, 10.0)
    assert (await day_of(bus, "rival")).used.requests == 1
    await end(bus, 10)
    await meter.catch_up()
    assert (await day_of(bus, "acme")).used.requests == 6
    text = metrics.render().decode()
    assert 'diptych_gateway_usage_total{kind="prompt_tokens",tenant="acme"}' in text
    await bus.close()


async def test_many_who_sum_at_once_and_die_between_steps(monkeypatch: Any) -> None:
    monkeypatch.setattr(metering, "MAX_EVENTS", 7)
    broker = MemoryBroker()
    buses = [broker.connect(f"g{n}") for n in range(4)]
    for number in range(60):
        await end(buses[0], number, f"t{number % 3}")
    meters = [Metering(bus) for bus in buses]
    dying = [asyncio.create_task(meter.catch_up()) for meter in meters[:3]]
    for turn, task in enumerate(dying):
        for _ in range(3 + 2 * turn):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*(meter.catch_up() for meter in meters))
    sums = [(await day_of(buses[0], f"t{n}")).used.requests for n in range(3)]
    assert sums == [20, 20, 20]
    for bus in buses:
        await bus.close()


async def test_a_lost_cursor_counts_nothing_twice() -> None:
    bus = MemoryBroker().connect("g")
    for number in range(5):
        await end(bus, number)
    meter = Metering(bus)
    await meter.catch_up()
    await bus.bucket(USAGE, cast("type[UsageEntry]", cast(Any, UsageEntry))).delete(CURSOR)
    await meter.catch_up()
    assert (await day_of(bus, "acme")).used.requests == 5
    await bus.close()

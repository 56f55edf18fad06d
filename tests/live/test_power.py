"""A real loop on simulated devices: telemetry in, leased set-points out."""

import asyncio

import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.port import Delivery
from diptych_contracts import subjects
from diptych_contracts.fleet import WorkerLoad
from diptych_testkit.live_stack import LiveStack

pytestmark = pytest.mark.live

DEFAULT_W = 300.0
BUDGET_W = 400.0


async def caps_become(bus: JetStreamBus, wanted: tuple[float, float], timeout_s: float) -> None:
    """Wait until the two workers report caps that add up to something in `wanted`."""
    caps: dict[str, float] = {}
    news = asyncio.Event()

    def note(delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        caps[load.worker] = load.cap_w
        news.set()

    listening = await bus.subscribe(subjects.LOADS, note)
    least, most = wanted
    async with asyncio.timeout(timeout_s):
        while not (len(caps) == 2 and least <= sum(caps.values()) <= most):
            news.clear()
            await news.wait()
    await listening.close()


async def test_a_budget_is_kept_while_a_governor_lives_and_no_longer(own_stack: LiveStack) -> None:
    workers = [own_stack.start("prefill-worker"), own_stack.start("decode-worker")]
    governor = own_stack.start("power-governor", BUDGET_W=str(BUDGET_W), LEASE_S="3")
    for process in (*workers, governor):
        await asyncio.to_thread(process.wait_ready)
    bus = await own_stack.join()
    try:
        await caps_become(bus, (BUDGET_W / 2, BUDGET_W), timeout_s=60)
        governor.kill()
        await caps_become(bus, (2 * DEFAULT_W, 2 * DEFAULT_W), timeout_s=60)
    finally:
        await bus.close()

"""Workers killed and frozen in the middle of a hand-off, on each link of the real stack.

The answer is the undisturbed one, and both sides say what became of the transfer: the reader's
ledger (what `diptych kv transfers` shows), and the writer's counter of hand-offs it withdrew.
"""

import asyncio
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot, KvTransfer
from diptych_contracts.errors import BusAway
from diptych_contracts.ids import Incarnation
from diptych_kvlink.nixl_library import why_absent
from diptych_testkit.live_stack import MODEL, LiveStack, Process

log = logging.getLogger("tests.kv")
pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
LONG = "Once upon a time there was a lighthouse keeper who counted every ship. " * 20
LINKS = [
    "shm",
    "tcp",
    pytest.param(
        "nixl", marks=pytest.mark.skipif(bool(why_absent()), reason="NIXL is not here: make nixl")
    ),
]
WITHIN_S = 120.0
TRIES = 6
MISSED_S = 20.0
UNDER_WAY = ("reserved", "verified")
ENDS = ("released", "expired", "failed")
ANY = (*UNDER_WAY, "written", *ENDS)


@pytest.fixture
async def bus(own_stack: LiveStack) -> AsyncIterator[JetStreamBus]:
    bus = await own_stack.join()
    yield bus
    await bus.close()


async def transfers(bus: JetStreamBus, worker: Incarnation) -> list[KvTransfer]:
    """Into a worker; none if it does not answer."""
    ask = KvAsk(ended=100)
    try:
        seen: KvSnapshot = await bus.request(
            subjects.control(worker), ask, KvSnapshot, timeout_s=0.5
        )
    except BusAway:
        return []
    return list(seen.transfers)


async def until_one_is(
    bus: JetStreamBus, workers: list[Incarnation], states: tuple[str, ...], known: set[str]
) -> tuple[Incarnation, KvTransfer]:
    """Wait for a transfer in one of `states`, none of those `known`; gives its reader, too."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            for worker in workers:
                for transfer in await transfers(bus, worker):
                    if transfer.state in states and transfer.transfer_id not in known:
                        return worker, transfer
            await asyncio.sleep(0.02)


async def ask(client: openai.AsyncOpenAI, link: str) -> tuple[str, dict[str, Any]]:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": LONG + "What did he see?"}],
        temperature=0,
        max_tokens=24,
        extra_body={"ignore_eos": True, "diptych": {"mode": "remote", "link": link}},
    )
    path = json.loads(answer.model_dump_json())["usage"]["diptych"]
    return answer.choices[0].message.content or "", path


def withdrawn(process: Process, link: str) -> float:
    """How many hand-offs over `link` a prefill worker has given up."""
    name = f'diptych_kv_transfers_total{{link="{link}",outcome="withdrawn"}} '
    lines = process.page("/metrics").decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["prefill-worker", "decode-worker"])
@pytest.mark.parametrize("link", LINKS)
async def test_a_worker_lost_in_mid_hand_off_is_reported_by_the_other_and_costs_no_word(
    own_stack: LiveStack,
    bus: JetStreamBus,
    link: str,
    victim: str,
    how: signal.Signals,
) -> None:
    kinds = {"LINKS": ",".join(dict.fromkeys(("shm", link))), "PREFIX_CACHE": "false"}
    own_stack.start_all(kinds)
    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=240
    ) as client:
        undisturbed, path = await ask(client, link)
        assert (path["attempt"], path["link"]) == (1, link)
        for _ in range(TRIES):
            if await strikes(own_stack, bus, Blow(link, victim, how, kinds), client, undisturbed):
                return
        raise AssertionError("each time the hand-off was over when the worker was struck")


@dataclass(frozen=True)
class Blow:
    """What befalls a worker in the middle of a hand-off."""

    link: str
    victim: str
    how: signal.Signals
    kinds: dict[str, str]


async def strikes(
    stack: LiveStack, bus: JetStreamBus, blow: Blow, client: openai.AsyncOpenAI, undisturbed: str
) -> bool:
    """Whether the hand-off was still under way. Whoever does not come to run may miss it."""
    first = stack.of(blow.victim)
    other = stack.of("decode-worker" if blow.victim == "prefill-worker" else "prefill-worker")
    reader = Incarnation(stack.of("decode-worker").incarnation)
    known = {t.transfer_id for t in await transfers(bus, reader)}
    before = await asyncio.to_thread(withdrawn, other, blow.link)
    asking = asyncio.create_task(ask(client, blow.link))
    _, begun = await until_one_is(bus, [reader], ANY, known)
    first.signal(blow.how)
    began_s = time.monotonic()
    stack.start(blow.victim, **blow.kinds)
    in_time = begun.state in UNDER_WAY
    if blow.victim == "prefill-worker":
        _, over = await until_one_is(bus, [reader], ENDS, known)
        in_time = in_time and over.state != "released"
        if in_time:
            assert over.transfer_id == begun.transfer_id
            assert over.state == "failed"
            died = blow.how is signal.SIGKILL and f"writer {begun.writer} died"
            assert over.reason in (died, "cancelled by its scheduler")
    text, path = await asking
    assert text == undisturbed
    assert path["link"] == blow.link
    if blow.victim == "decode-worker" and in_time:
        in_time = path["attempt"] > 1 and await counted(
            lambda: withdrawn(other, blow.link) > before
        )
    log.info("reported after %.2f s at most", time.monotonic() - began_s)
    if blow.how is signal.SIGSTOP:
        first.signal(signal.SIGCONT)
    if blow.how is signal.SIGSTOP and blow.victim == "decode-worker":
        await until_one_is(bus, [reader], ENDS, known)  # released, if it had verified it in time
    await nothing_is_held(stack, bus)
    if not in_time:
        await asyncio.to_thread(stack.of(blow.victim).wait_ready)
        if blow.how is signal.SIGSTOP:
            await asyncio.to_thread(first.kill)
        await asyncio.to_thread(stack.wait_for_model)
    return in_time


async def counted(holds: Callable[[], bool]) -> bool:
    """Whether it comes true; what was decoding already when it was struck is counted nowhere."""
    give_up_s = time.monotonic() + MISSED_S
    while not await asyncio.to_thread(holds):
        if time.monotonic() > give_up_s:
            return False
        await asyncio.sleep(0.05)
    return True


async def nothing_is_held(stack: LiveStack, bus: JetStreamBus) -> None:
    readers = [
        Incarnation(process.incarnation)
        for process in stack.processes
        if process.service == "decode-worker" and process.popen.poll() is None
    ]
    async with asyncio.timeout(WITHIN_S):
        for reader in readers:
            while any(t.state not in ENDS for t in await transfers(bus, reader)):
                await asyncio.sleep(0.05)

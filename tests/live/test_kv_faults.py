"""Workers killed and frozen in the middle of a hand-off, on each link of the real stack.

The answer is the undisturbed one, and both sides say what became of the transfer: the reader's
ledger (what `diptych kv transfers` shows), and the writer's counter of hand-offs it withdrew.
"""

import asyncio
import json
import logging
import signal
import time
from collections.abc import AsyncIterator
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
pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
LONG = "Once upon a time there was a lighthouse keeper who counted every ship. " * 20
LINKS = [
    "shm",
    "tcp",
    pytest.param(
        "nixl", marks=pytest.mark.skipif(bool(why_absent()), reason="NIXL is not here: make nixl")
    ),
]
WITHIN_S = 60.0
ENDS = ("released", "expired", "failed")


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
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=120
    ) as client:
        undisturbed, path = await ask(client, link)
        assert (path["attempt"], path["link"]) == (1, link)
        first = own_stack.of(victim)
        other = own_stack.of("decode-worker" if victim == "prefill-worker" else "prefill-worker")
        reader = Incarnation(own_stack.of("decode-worker").incarnation)
        known = {t.transfer_id for t in await transfers(bus, reader)}
        asking = asyncio.create_task(ask(client, link))
        _, begun = await until_one_is(bus, [reader], ("reserved", "verified"), known)
        own_stack.start(victim, **kinds)
        first.signal(how)
        began_s = time.monotonic()

        if victim == "prefill-worker":
            _, over = await until_one_is(bus, [reader], ENDS, known)
            assert over.transfer_id == begun.transfer_id
            assert over.state == "failed"
            died = how is signal.SIGKILL and f"writer {begun.writer} died"
            assert over.reason in (died, "cancelled by its scheduler")
        else:
            async with asyncio.timeout(WITHIN_S):
                while not await asyncio.to_thread(withdrawn, other, link):
                    await asyncio.sleep(0.02)
        log.info("reported after %.2f s", time.monotonic() - began_s)
        text, path = await asking
        assert text == undisturbed
        assert path["link"] == link
        if how is signal.SIGSTOP:
            first.signal(signal.SIGCONT)
        if how is signal.SIGSTOP and victim == "decode-worker":
            _, over = await until_one_is(bus, [reader], ENDS, known)
            assert over.state in ("failed", "expired")
        await nothing_is_held(own_stack, bus)


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

"""Ten thousand requests and frames of ill will: no crash, no leak, only documented answers."""

import asyncio
import logging
import os
import re
import time
from pathlib import Path

import openai
import psutil
import pytest

from diptych_testkit.hostile import Hostility
from diptych_testkit.hostile_clients import HttpClient, Judge, SocketClient
from diptych_testkit.live_stack import MODEL, LiveStack, Process

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

log = logging.getLogger(__name__)

SEED = os.environ.get("DIPTYCH_HOSTILE_SEED", "5")
HTTP_CLIENTS, SOCKET_CLIENTS, WIRE_CLIENTS = 10, 4, 2
HTTP_REQUESTS, FRAMES, WIRES = 700, 600, 300
"""Of each client: 7,000 requests, 2,400 frames and 600 broken wires."""
WARM_UP_FRAC = 0.25
GROWTH_MB = 24.0
"""Allowed after the warm-up: buffers of 8 MiB bodies come and go."""
GROWN = 2
"""File descriptors and tasks more or less: the bus has some that come and go."""
SETTLED_S = 120.0
SERVER_FAULTS = re.compile(r"(?:frame )?5\d\d ")
DOCUMENT = Path(__file__).parents[2] / "docs/clients.md"


def documented() -> dict[int, frozenset[str]]:
    """Each status with its codes, as the document has them."""
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", DOCUMENT.read_text(), re.MULTILINE)
    errors = {int(status): frozenset(re.findall(r"`(\w+)`", codes)) for status, codes in rows}
    return {200: frozenset(), **errors}


def process_of(member: Process) -> psutil.Process:
    tether = psutil.Process(member.popen.pid)
    tree = [tether, *tether.children(recursive=True)]
    return max(tree, key=lambda process: process.memory_info().rss)


class Vitals:
    """What must not grow in a gateway."""

    def __init__(self, gateway: Process) -> None:
        process = process_of(gateway)
        self.rss_mb = process.memory_info().rss / 1e6
        self.fds = process.num_fds()
        self.tasks = _metric(gateway.page("/metrics").decode(), "diptych_tasks")


def held(stack: LiveStack) -> dict[str, float]:
    """Whatever members still hold; empty if they are at rest."""
    families = (
        "diptych_gateway_open_streams",
        "diptych_scheduler_queued_requests",
        "diptych_scheduler_owned_requests",
        "diptych_kv_transfer_slots_used",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    )
    found = {}
    for process in stack.processes:
        text = process.page("/metrics").decode()
        for family in families:
            if value := _metric(text, family):
                found[f"{process.service} {family}"] = value
    return found


def _metric(text: str, family: str) -> float:
    lines = [line for line in text.splitlines() if re.match(rf"{family}[ {{]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def attack(port: int, judge: Judge, *, part: str, frac: float) -> None:
    """A fraction of everything, by all clients at once."""

    def drawing(kind: str, number: int) -> Hostility:
        return Hostility(f"{SEED}/{part}/{kind}/{number}", MODEL)

    async with asyncio.TaskGroup() as clients:
        for number in range(HTTP_CLIENTS):
            http = HttpClient(port, drawing("http", number), judge)
            clients.create_task(http.run(int(HTTP_REQUESTS * frac)))
        for number in range(SOCKET_CLIENTS):
            socket = SocketClient(port, drawing("socket", number), judge)
            clients.create_task(socket.run(int(FRAMES * frac)))
        for number in range(WIRE_CLIENTS):
            wire = SocketClient(port, drawing("wire", number), judge)
            clients.create_task(wire.break_wire(int(WIRES * frac)))


async def at_rest(stack: LiveStack) -> None:
    give_up_s = time.monotonic() + SETTLED_S
    while left := held(stack):
        assert time.monotonic() < give_up_s, f"still held: {left}"
        await asyncio.sleep(0.1)


async def like(before: Vitals, gateway: Process) -> Vitals:
    """The vitals once connections that were cut have been let go; a leak never is."""
    give_up_s = time.monotonic() + SETTLED_S
    while True:
        after = Vitals(gateway)
        grown = max(after.fds - before.fds, after.tasks - before.tasks)
        if grown <= GROWN or time.monotonic() > give_up_s:
            return after
        await asyncio.sleep(0.2)


async def test_ten_thousand_requests_of_ill_will(sim: LiveStack) -> None:
    gateway = sim.of("gateway")
    judge = Judge(documented())
    await attack(sim.port, judge, part="warm-up", frac=WARM_UP_FRAC)
    await at_rest(sim)
    before = Vitals(gateway)

    await attack(sim.port, judge, part="rest", frac=1 - WARM_UP_FRAC)
    await at_rest(sim)
    after = await like(before, gateway)

    counted = dict(sorted(judge.seen.items()))
    log.info("seed %s: %s", SEED, counted)
    log.info("rss %.1f MB, then %.1f MB", before.rss_mb, after.rss_mb)
    assert not judge.faults, f"{len(judge.faults)}:\n" + "\n".join(judge.faults[:20])
    assert sum(counted.values()) >= 10_000
    assert not [what for what in counted if SERVER_FAULTS.match(what)], counted
    assert counted["200"] > 200, "some of it was valid"
    assert counted["frame response.completed"] + counted["frame response.incomplete"] > 100
    assert after.rss_mb - before.rss_mb < GROWTH_MB
    assert after.fds <= before.fds + GROWN
    assert after.tasks <= before.tasks + GROWN
    assert gateway.popen.poll() is None
    assert "crashed" not in gateway.log.read_text(errors="replace")
    with openai.OpenAI(base_url=sim.base_url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4

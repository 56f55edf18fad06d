"""Each service, asked to stop under load: no client sees an error; it leaves when it is done."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator

import openai
import pytest

from diptych_contracts.events import LifeCycleEvent, MemberDrained
from diptych_contracts.streams import EVENTS
from diptych_testkit.live_stack import MODEL, LiveStack, Process
from diptych_testkit.ports import free_port

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

STREAMS = 6
TOKENS = 40
QUESTIONS = [f"Write a long story about number {number}." for number in range(STREAMS)]


async def stream(client: openai.AsyncOpenAI, question: str, begun: asyncio.Event) -> str:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text, finish = "", None
    async for chunk in answer:
        begun.set()
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    assert finish == "length"
    return text


class Load:
    """Streams that go on while somebody leaves."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._begun = [asyncio.Event() for _ in QUESTIONS]
        self._streams = [
            asyncio.create_task(stream(client, question, begun))
            for question, begun in zip(QUESTIONS, self._begun, strict=True)
        ]

    async def begun(self) -> None:
        async with asyncio.timeout(120):
            for begun in self._begun:
                await begun.wait()

    async def texts(self) -> list[str]:
        async with asyncio.timeout(240):
            return await asyncio.gather(*self._streams)


def said_drained(process: Process) -> list[int]:
    """What its log says was left when it had drained."""
    lines = process.log.read_text(errors="replace").splitlines()
    return [json.loads(line)["left"] for line in lines if '"drained"' in line]


async def drained(stack: LiveStack, member: str) -> MemberDrained | None:
    """The event of a member's drain, if it could be stored within the second it is given."""
    bus = await stack.join()
    try:
        for seq in range(1, 10_000):
            stored = await bus.stored(EVENTS.name, seq)
            if stored is None:
                break
            event: LifeCycleEvent = stored.decode(LifeCycleEvent)
            if isinstance(event, MemberDrained) and event.member == member:
                return event
    finally:
        await bus.close()
    return None


async def asked_to_stop(process: Process) -> list[str]:
    """SIGTERM, and the end with code 0; gives what its health page said meanwhile."""
    said: list[str] = []
    process.signal(signal.SIGTERM)
    give_up_s = time.monotonic() + 120
    while process.popen.poll() is None:
        assert time.monotonic() < give_up_s, process.last_words()
        page = await asyncio.to_thread(process.page, "/health/ready")
        detail = json.loads(page)["detail"] if page else ""
        if detail and (not said or said[-1] != detail):
            said.append(detail)
        await asyncio.sleep(0.02)
    assert process.popen.returncode == 0, process.last_words()
    return said


@pytest.fixture(scope="module")
def patient_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """One whose services take the time that they have by default; tests leave it whole."""
    live = LiveStack(tmp_path_factory.mktemp("stack"), patient=True, DRAIN_S="60")
    try:
        live.start_all()
        yield live
    finally:
        live.close()


def client_of(stack: LiveStack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=240)


@pytest.fixture(scope="module")
def undisturbed(patient_stack: LiveStack) -> list[str]:
    """Every question's answer while nobody leaves."""

    async def ask() -> list[str]:
        async with client_of(patient_stack) as client:
            return await Load(client).texts()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "victim", ["decode-worker", "prefill-worker", "scheduler", "power-governor"]
)
async def test_no_client_notices_that_a_service_leaves(
    patient_stack: LiveStack, undisturbed: list[str], victim: str
) -> None:
    leaver = patient_stack.of(victim)
    leaver_id = leaver.incarnation
    if victim != "scheduler":  # a lone scheduler has nobody to hand over to
        patient_stack.start(victim)
        await asyncio.to_thread(patient_stack.processes[-1].wait_ready)
    async with client_of(patient_stack) as client:
        load = Load(client)
        await load.begun()
        said = await asked_to_stop(leaver)
        assert await load.texts() == undisturbed
    assert said_drained(leaver) == [0]
    event = await drained(patient_stack, leaver_id)
    assert event is None or event.left == 0
    assert all(words.startswith(("draining", "drained")) for words in said), said
    if victim == "scheduler":
        patient_stack.start(victim).wait_ready()
        await asyncio.to_thread(patient_stack.wait_for_model)


async def test_a_stream_in_flight_at_sigterm_is_finished(patient_stack: LiveStack) -> None:
    port = free_port()
    gateway = patient_stack.start("gateway", PORT=str(port))
    await asyncio.to_thread(gateway.wait_ready)
    chunks, finish = 0, None
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Write a long story about a lighthouse keeper."}],
            temperature=0,
            max_tokens=40,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            chunks += 1
            if chunks == 2:
                gateway.signal(signal.SIGTERM)
            finish = chunk.choices[0].finish_reason
    assert finish == "length"
    assert await asyncio.to_thread(gateway.popen.wait, 120) == 0

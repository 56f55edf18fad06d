"""A real stack, and somebody with the credential of one of its decode workers."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator

import openai
import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.port import Delivery
from diptych_chassis.orders import Orders
from diptych_contracts import subjects
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.orders import Signed
from diptych_contracts.power import PowerSetPoint
from diptych_contracts.requests import RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_identity.roles import Role
from diptych_policy.voices import attempt_voice, owner_voice
from diptych_testkit.forgeries import THIEF, forgeries, framed
from diptych_testkit.live_stack import MODEL, LiveStack, Process

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
TOKENS = 64


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    live = LiveStack(tmp_path_factory.mktemp("stack"), patient=True)
    try:
        live.start_all()
        yield live
    finally:
        live.close()


@pytest.fixture
async def thief(stack: LiveStack) -> AsyncIterator[JetStreamBus]:
    """On the bus, with all the rights that a decode worker has, and no job."""
    bus = await stack.guarded.join(Role.DECODE_WORKER, THIEF)
    yield bus
    await bus.close()


async def story(stack: LiveStack, meanwhile: Callable[[RequestId], object] | None = None) -> str:
    """What a client reads, and how it ends; `meanwhile` begins with the first chunk."""
    told, task = [], None
    async with openai.AsyncOpenAI(
        base_url=stack.base_url, api_key="none", max_retries=0, timeout=120
    ) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a long story."}],
            temperature=0,
            max_tokens=TOKENS,
            stream=True,
        )
        async for chunk in stream:
            if meanwhile is not None and task is None:
                request_id = RequestId(chunk.id.removeprefix("chatcmpl-"))
                task = asyncio.ensure_future(meanwhile(request_id))  # type: ignore[arg-type]
            for choice in chunk.choices:
                told.append(choice.delta.content or "")
                told.append(choice.finish_reason or "")
    if task is not None:
        await task
    return "".join(told)


def counted(process: Process, name: str) -> float:
    """A number of its metrics, all labels together; `name` may hold a label."""
    lines = process.page("/metrics").decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def told(process: Process) -> int:
    """How often its log tells of a forged entry."""
    return process.log.read_text(errors="replace").count("forged_entry")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.1)


async def test_it_cannot_speak_for_a_request_it_does_not_hold(
    stack: LiveStack, thief: JetStreamBus
) -> None:
    undisturbed = await story(stack)
    gateway = Incarnation(stack.of("gateway").incarnation)
    said = 0

    async def forge(request_id: RequestId) -> None:
        nonlocal said
        for index in range(8):
            for entry in framed(forgeries(request_id, 1, b"\0" * 16 * (index % 2), index=index)):
                await thief.record(gateway, entry, timeout_s=60)
                said += 1

    assert await story(stack, forge) == undisturbed
    for service in ("gateway", "scheduler"):
        process = stack.of(service)
        name = f"diptych_{service}_forged_entries_total"
        await until(lambda: counted(process, name) > 0)  # noqa: B023
        assert counted(process, name) <= said
        await until(lambda: told(process) > 0)  # noqa: B023
        assert told(process) == 1


async def test_it_gives_no_orders_and_a_recorded_one_is_worth_nothing(stack: LiveStack) -> None:
    """Said by somebody who may publish anything: the signature decides, not the bus alone."""
    worker = stack.of("decode-worker")
    subject = subjects.power(Incarnation(worker.incarnation))
    heard: asyncio.Queue[Signed] = asyncio.Queue(16)

    def note(delivery: Delivery) -> None:
        heard.put_nowait(delivery.decode(Signed))

    def refused(reason: str) -> float:
        return counted(worker, f'diptych_orders_refused_total{{reason="{reason}"}}')

    anybody = await stack.join()
    listening = await anybody.subscribe(subject, note)
    recorded = await asyncio.wait_for(heard.get(), 60)
    await listening.close()
    access = stack.guarded.access(Role.DECODE_WORKER, f"{THIEF}-2")
    orders = Orders(
        Incarnation("power-governor-9"),
        Role.POWER_GOVERNOR.value,
        unix_ms=anybody.unix_ms,
        identity=lambda: access.identity,
    )
    point = PowerSetPoint(
        governor=Incarnation("power-governor-9"),
        worker=Incarnation(worker.incarnation),
        sequence=1,
        cap_w=1.0,
        lease_ms=10_000,
    )
    await anybody.publish(subject, recorded)
    await anybody.publish(subject, point)
    await anybody.publish(subject, orders.signed(subject, point, epoch=10**9, valid_ms=10_000))
    for reason in ("replayed", "unsigned", "forged"):
        await until(lambda: refused(reason) == 1)  # noqa: B023
    await anybody.close()


async def test_secrets_and_voices_stand_in_no_log(stack: LiveStack) -> None:
    bus = await stack.join()
    records = await bus.bucket(REQUEST_RECORDS, RequestRecord).values()
    await bus.close()
    secrets = [kept.value.secret for kept in records]
    voices = [attempt_voice(secret, 1) for secret in secrets] + list(map(owner_voice, secrets))
    hidden = [form for value in (*secrets, *voices) for form in forms_of(value)]
    assert len(hidden) >= 2 * 3 * 3
    logs = [path.read_text(errors="replace") for path in stack.folder.rglob("*.log")]
    pages = [process.page("/metrics").decode() for process in stack.processes]
    for form in hidden:
        assert not any(form in text for text in (*logs, *pages))


def forms_of(value: bytes) -> tuple[str, str, str]:
    """How a secret would look in a text."""
    return value.hex(), base64.b64encode(value).decode().rstrip("="), repr(value)[2:-1]

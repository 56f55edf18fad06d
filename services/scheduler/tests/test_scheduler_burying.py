"""What is kept of a dead request beside its message."""

from collections.abc import AsyncIterator

import pytest

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_contracts import subjects
from diptych_contracts.dead import Cause, DeadLetter, DeadRequest
from diptych_contracts.ids import Incarnation
from diptych_contracts.prompts import PromptRef
from diptych_contracts.requests import Request
from diptych_contracts.streams import (
    DEAD,
    DEAD_PROMPTS,
    MAX_MESSAGE_BYTES,
    PROMPTS,
    REQUESTS,
)
from diptych_scheduler.burying import bury_letter, bury_request
from diptych_testkit.builders import GATEWAY, REQUEST, a_request


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBroker().connect("test")
    yield bus
    await bus.close()


def a_dead(request: Request) -> DeadRequest:
    return DeadRequest(
        request_id=REQUEST,
        gateway=GATEWAY,
        scheduler=Incarnation("s1"),
        cause=Cause.LOST_WORKERS,
        detail="why",
        request=request,
        died_unix_ms=1,
    )


async def kept(bus: MemoryBus, kind: type) -> list[object]:
    found = bus.all_stored(DEAD.name, subject=subjects.DEADS)
    return [item.delivery.decode(kind) async for item in found]


async def test_a_request_is_buried_once(bus: MemoryBus) -> None:
    dead = a_dead(a_request())
    await bury_request(bus, dead, None)
    await bury_request(bus, dead, None)
    assert await kept(bus, DeadRequest) == [dead]


async def test_a_long_prompt_is_kept_as_long_as_its_request_is(bus: MemoryBus) -> None:
    """Where it stands it goes with the record, in minutes."""
    ref = PromptRef(name="r1", tokens=4, width=1, digest="d")
    await bus.put_object(PROMPTS, "r1", b"data")
    await bury_request(bus, a_dead(a_request(prompt_ids=(), prompt=ref)), None)
    assert await bus.get_object(DEAD_PROMPTS, REQUEST) == b"data"


async def test_what_fills_a_message_by_itself_is_kept_without_its_prompt(bus: MemoryBus) -> None:
    prompt_ids = tuple(range(70_000, 70_000 + MAX_MESSAGE_BYTES // 5))
    await bury_request(bus, a_dead(a_request(prompt_ids=prompt_ids)), None)
    (dead,) = await kept(bus, DeadRequest)
    assert isinstance(dead, DeadRequest)
    assert dead.request is None


async def test_a_letter_that_fills_a_message_keeps_its_beginning(bus: MemoryBus) -> None:
    subject = subjects.request("batch", "m")
    whole = DeadLetter(subject="s", reason="r", payload=b"x" * (MAX_MESSAGE_BYTES - 120))
    done = await bus.store(subject, whole, msg_id="x", timeout_s=60)
    delivery = await bus.stored(REQUESTS.name, done.seq)
    assert delivery is not None
    await bury_letter(bus, REQUESTS.name, done.seq, delivery, "expected a Request")
    (letter,) = await kept(bus, DeadLetter)
    assert isinstance(letter, DeadLetter)
    assert letter.payload == delivery.data[: len(delivery.data) // 2]

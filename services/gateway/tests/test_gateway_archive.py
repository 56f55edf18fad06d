"""What is written into bucket `responses`, once, whoever is first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from diptych_bus.memory import MemoryBroker
from diptych_contracts.errors import BusAway
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason
from diptych_contracts.responses import StoredAnswer, StoredMessage, StoredResponse
from diptych_contracts.sampling import Sampling
from diptych_contracts.streams import MAX_RESPONSE_BYTES, RESPONSE_PARTS
from diptych_gateway.errors import ApiError
from diptych_gateway.keeping.archive import Archive

pytestmark = pytest.mark.virtual_time

RID = RequestId("a" * 32)
STORED = StoredResponse(
    request_id=RID,
    gateway=Incarnation("gateway-1"),
    journal_seq=0,
    model="tiny",
    created_unix_ms=1,
    deadline_unix_ms=2,
    prompt_tokens=1,
    sampling=Sampling(),
    input=(StoredMessage(role="user", text="Hi"),),
)


def answer(text: str) -> StoredAnswer:
    end = End(request_id=RID, attempt=1, reason=EndReason.STOP)
    return StoredAnswer(deltas=(text,), tokens=1, end=end, ended_unix_s=9)


@asynccontextmanager
async def writing(bus: Any) -> AsyncIterator[Archive]:
    made = Archive(bus)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def bus() -> AsyncIterator[Any]:
    made = MemoryBroker().connect("gateway")
    yield made
    await made.close()


async def test_the_first_answer_stands(bus: Any) -> None:
    async with writing(bus) as archive, writing(bus) as other:
        await archive.create(STORED)
        assert await archive.finish(RID, lambda: answer("first"), timeout_s=60)
        assert await other.finish(RID, lambda: answer("second"), timeout_s=60)
        found = await archive.get(STORED.response_id, tenant="default")
    assert found == msgspec.structs.replace(STORED, answer=answer("first"))


async def test_what_was_deleted_does_not_come_back(bus: Any) -> None:
    async with writing(bus) as archive:
        await archive.create(STORED)
        await archive.delete(STORED)
        assert await archive.finish(RID, lambda: answer("late"), timeout_s=60)
        assert await archive.get(STORED.response_id, tenant="default") is None


async def test_writes_wait_for_the_bus_to_come_back(bus: Any) -> None:
    async with writing(bus) as archive:
        await archive.create(STORED)
        real_get, away = archive._bucket.get, [True]

        async def get(key: str) -> Any:
            if away.pop() if away else False:
                raise BusAway("away")
            return await real_get(key)

        archive._bucket.get = get  # type: ignore[method-assign]
        assert not await archive.finish(RID, lambda: answer("a"), timeout_s=0.01)
        assert await archive.settled(60)
        found = await archive.get(STORED.response_id, tenant="default")
    assert found is not None
    assert found.answer == answer("a")


async def test_too_much_to_store_is_a_413_that_says_how_much_and_stores_nothing(bus: Any) -> None:
    big = msgspec.structs.replace(STORED, instructions="x" * MAX_RESPONSE_BYTES)
    archive = Archive(bus)
    with pytest.raises(ApiError) as refused:
        await archive.create(big)
    assert (refused.value.status, refused.value.param) == (413, "instructions")
    assert str(MAX_RESPONSE_BYTES) in str(refused.value)
    assert await archive.get(STORED.response_id, tenant="default") is None
    assert await bus.object_names(RESPONSE_PARTS) == []


LONG = msgspec.structs.replace(
    STORED,
    input=(StoredMessage(role="user", text="x" * 5_000_000),),
    history=(StoredMessage(role="user", text="before"),),
    instructions="Be brief.",
)


async def test_a_long_turn_is_kept_apart_and_found_whole_by_another_gateway(bus: Any) -> None:
    async with writing(bus) as archive:
        kept = await archive.create(LONG)
        assert (kept.input, kept.instructions) == ((), "Be brief.")
        assert await archive.finish(RID, lambda: answer("short"), timeout_s=60)
    other = Archive(bus)
    found = await other.get(LONG.response_id, tenant="default")
    assert found is not None
    assert found == msgspec.structs.replace(kept, answer=answer("short"))
    whole = await other.with_messages(found)
    assert (whole.input, whole.history) == (LONG.input, LONG.history)
    assert await bus.object_names(RESPONSE_PARTS) == [f"{LONG.response_id}.turn"]
    await other.delete(found)
    assert await bus.object_names(RESPONSE_PARTS) == []


async def test_a_long_answer_is_kept_apart_and_shown_whole(bus: Any) -> None:
    long = msgspec.structs.replace(answer(""), deltas=("words ",) * 100_000)
    async with writing(bus) as archive, writing(bus) as other:
        await archive.create(STORED)
        done = (archive.finish(RID, lambda: long, timeout_s=60) for archive in (archive, other))
        assert await asyncio.gather(*done) == [True, True]
        found = await archive.get(STORED.response_id, tenant="default")
        assert found is not None
        assert found.answer is not None
        assert found.answer.deltas == long.deltas
        await archive.delete(found)
    assert await bus.object_names(RESPONSE_PARTS) == []


async def test_an_answer_that_ends_while_its_response_is_deleted_leaves_nothing(bus: Any) -> None:
    long = msgspec.structs.replace(answer(""), deltas=("words ",) * 100_000)
    async with writing(bus) as archive:
        await archive.create(LONG)
        put = bus.put_object

        async def deleted_meanwhile(bucket: str, name: str, data: bytes) -> None:
            await put(bucket, name, data)
            if name.endswith(".text"):
                await archive._bucket.delete(LONG.response_id)

        bus.put_object = deleted_meanwhile
        assert await archive.finish(RID, lambda: long, timeout_s=60)
    assert await bus.object_names(RESPONSE_PARTS) == [f"{LONG.response_id}.turn"]


async def test_a_response_whose_part_is_gone_says_so(bus: Any) -> None:
    archive = Archive(bus)
    kept = await archive.create(LONG)
    await bus.delete_object(RESPONSE_PARTS, f"{LONG.response_id}.turn")
    with pytest.raises(ApiError) as gone:
        await archive.with_messages(kept)
    assert (gone.value.status, gone.value.code) == (410, "response_expired")


@pytest.mark.parametrize("wanted", ["", "*", ">", "resp_*", f"resp_{'a' * 31}.", "a" * 32])
async def test_only_an_id_is_a_key(bus: Any, wanted: str) -> None:
    assert await Archive(bus).get(wanted, tenant="default") is None

"""Which models are served, as workers and cards come and go."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
import structlog

from diptych_bus.memory import MemoryBroker
from diptych_contracts import subjects
from diptych_contracts.cards import Fingerprint, KvLayout, ModelCard
from diptych_contracts.errors import Transient, UnknownModel
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_contracts.streams import MODELS, WORKERS
from diptych_contracts.wire import encode
from diptych_gateway.admission.models import Models
from diptych_testkit.tiny_gguf import tiny_card

pytestmark = pytest.mark.virtual_time

NAME = "org/tiny.v1"
CARD = tiny_card(model=NAME)
LAYOUT = KvLayout(layout_id="x", engine_build="x", block_tokens=64, slot_bytes=1, dtype="f16")


def offer(worker: str, fingerprint: Fingerprint = CARD.fingerprint) -> WorkerRegistration:
    return WorkerRegistration(
        worker=Incarnation(worker),
        role=Role.DECODE,
        engine="scripted",
        model=NAME,
        fingerprint=fingerprint,
        layout=LAYOUT,
        endpoints=(),
        max_sequences=1,
        kv_tokens=1,
        context_tokens=1,
    )


async def put_card(bus: Any, card: ModelCard) -> None:
    await bus.put_object(MODELS, subjects.escape(NAME), encode(card))


async def put_offer(bus: Any, registration: WorkerRegistration) -> None:
    await bus.bucket(WORKERS, WorkerRegistration).put(registration.worker, registration)


@pytest.fixture
async def bus() -> AsyncIterator[Any]:
    made = MemoryBroker().connect("test")
    yield made
    await made.close()


@pytest.fixture
async def models(bus: Any) -> AsyncIterator[Models]:
    with ThreadPoolExecutor(1) as executor:
        made = Models(bus, executor)
        await made.start()
        task = asyncio.create_task(made.run())
        yield made
        task.cancel()
        await asyncio.wait([task])
        await made.close()


async def served(models: Models, *context_tokens: int, within_s: float = 60) -> None:
    expected = list(context_tokens or (CARD.context_tokens,))
    async with asyncio.timeout(within_s):
        while [card.context_tokens for card in models] != expected:
            await asyncio.sleep(0.01)


async def known(models: Models) -> None:
    """Wait until it is heard that somebody offers it."""
    async with asyncio.timeout(60):
        while True:
            try:
                models.get(NAME)
                return
            except UnknownModel:
                await asyncio.sleep(0.01)
            except Transient:
                return


async def gone(models: Models) -> None:
    async with asyncio.timeout(60):
        while list(models):
            await asyncio.sleep(0.01)


async def test_a_model_nobody_offers_is_unknown(models: Models) -> None:
    with pytest.raises(UnknownModel, match=r"served: none"):
        models.get(NAME)


async def test_a_card_that_comes_late_is_waited_for(bus: Any, models: Models) -> None:
    await put_offer(bus, offer("worker-1"))
    await known(models)
    with pytest.raises(Transient):
        models.get(NAME)
    await put_card(bus, CARD)
    await served(models)
    assert models.get(NAME).card == CARD


async def test_a_card_that_comes_slowly_comes(
    bus: Any, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try begins anew: with the same time for all none would ever be long enough."""
    fetch, tries = bus.get_object, []

    async def slow(bucket: Any, name: str) -> bytes | None:
        tries.append(name)
        await asyncio.sleep(30)
        return cast("bytes | None", await fetch(bucket, name))

    monkeypatch.setattr(bus, "get_object", slow)
    await put_card(bus, CARD)
    await put_offer(bus, offer("worker-1"))
    await served(models, within_s=240)
    assert len(tries) == 4, "5, 10, 20 and 40 s"


async def test_a_codec_that_takes_long_is_built_once(bus: Any) -> None:
    built = []

    @asynccontextmanager
    async def busy(_longer_s: float) -> AsyncIterator[None]:
        built.append(1)
        await asyncio.sleep(40)  # as where building takes so long
        yield

    await put_card(bus, CARD)
    await put_offer(bus, offer("worker-1"))
    with ThreadPoolExecutor(1) as executor:
        models = Models(bus, executor, busy)
        await models.start()
        await served(models)
        await models.close()
    assert built == [1]


async def test_a_model_goes_with_its_last_worker(bus: Any, models: Models) -> None:
    await put_card(bus, CARD)
    await put_offer(bus, offer("worker-1"))
    await put_offer(bus, offer("worker-2"))
    await served(models)
    bucket = bus.bucket(WORKERS, WorkerRegistration)
    await bucket.delete("worker-1")
    await asyncio.sleep(0.01)
    assert models.get(NAME).card == CARD
    await bucket.delete("worker-2")
    await gone(models)
    with pytest.raises(Transient, match="no worker ready"):
        models.get(NAME)


async def test_a_worker_with_another_base_brings_the_newest_card(bus: Any, models: Models) -> None:
    await put_card(bus, CARD)
    await put_offer(bus, offer("worker-1"))
    await served(models)
    other = Fingerprint(base="other", weights="Q8_0")
    await put_card(bus, msgspec.structs.replace(CARD, fingerprint=other, context_tokens=99))
    await put_offer(bus, offer("worker-2", other))
    await served(models, 99)
    assert models.get(NAME).card.fingerprint == other


async def test_a_stray_worker_does_not_change_the_model(bus: Any, models: Models) -> None:
    await put_card(bus, CARD)
    await put_offer(bus, offer("worker-1"))
    await served(models)
    codec = models.get(NAME).codec
    await put_offer(bus, offer("worker-2", Fingerprint(base="stray", weights="Q8_0")))
    await asyncio.sleep(0.05)
    assert models.get(NAME).codec is codec


async def test_a_broken_card_is_not_served(bus: Any, models: Models) -> None:
    await put_card(bus, msgspec.structs.replace(CARD, tokenizer_json="{}"))
    await put_offer(bus, offer("worker-1"))
    await known(models)
    await asyncio.sleep(0.05)
    with pytest.raises(Transient):
        models.get(NAME)
    assert list(models) == []


async def test_a_busy_machine_builds_a_codec_once_and_serves(
    bus: Any, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that needed more than 5 s began again and again, and never served."""
    loop, built = asyncio.get_running_loop(), []

    def slowly(_: Any, build: Any, *args: Any) -> asyncio.Future[Any]:
        """20 s for each, one after another, wanted or not: as a thread does."""
        built.append(args)
        done = loop.create_future()
        loop.call_later(
            20.0 * len(built), lambda: done.cancelled() or done.set_result(build(*args))
        )
        return done

    monkeypatch.setattr(loop, "run_in_executor", slowly)
    await put_card(bus, CARD)
    await put_offer(bus, offer("worker-1"))
    await served(models)
    assert len(built) == 1


async def test_a_bus_that_does_not_answer_is_named(
    bus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silence(*_: Any) -> None:
        await asyncio.sleep(1000)

    await put_offer(bus, offer("worker-1"))
    monkeypatch.setattr(bus, "get_object", silence)
    with ThreadPoolExecutor(1) as executor, structlog.testing.capture_logs() as logs:
        models = Models(bus, executor)
        await models.start()
        await models.close()
    (told,) = [log for log in logs if log["event"] == "model_card_unreachable"]
    assert told["error"] == f"no card of '{NAME}' from the bus within 5 s"

"""KV of real weights, encoded on its way through a real fleet: fewer bytes, and what they cost."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from diptych_bus.port import Bus
from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot, KvTransfer
from diptych_contracts.ids import Incarnation, new_incarnation, new_request_id
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Deadlines, Forced, Mode
from diptych_contracts.sampling import Stopping
from diptych_testkit.builders import a_request
from diptych_testkit.bus_client import BusClient
from diptych_testkit.live_model import codec
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROMPT_TOKENS = 256
ANSWER_TOKENS = 16
PATIENCE_S = 600.0
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
SMALLER = {"zstd": 1.16, "int8": 2.36, "fp8": 2.79, "delta": 3.62}
"""How much, as `docs/kv.md` has it of other pages."""
ALL = ",".join(["raw", *SMALLER])


@dataclass(frozen=True)
class Handed:
    """One answer, and how its KV came."""

    tokens: list[int]
    transfer: KvTransfer


class Desk:
    """Asks the fleet, and its decode worker what came."""

    def __init__(self, stack: LiveStack, bus: Bus, client: BusClient) -> None:
        self.stack, self._bus, self._client = stack, bus, client
        self.prompt = tuple(codec().encode(PAGE.read_text())[:PROMPT_TOKENS])

    async def handed(self, link: str) -> Handed:
        request = a_request(
            new_request_id(Random()),
            model=MODEL,
            prompt_ids=self.prompt,
            stopping=Stopping(max_tokens=ANSWER_TOKENS, ignore_eos=True),
            deadlines=Deadlines(first_token_s=PATIENCE_S, inter_token_s=300.0, transfer_s=300.0),
            forced=Forced(mode=Mode.REMOTE, link=link),  # type: ignore[arg-type]
        )
        await self._client.send(request)
        end = await self._client.ended(request.request_id, timeout_s=PATIENCE_S)
        assert end.reason is EndReason.LENGTH, end
        worker = Incarnation(self.stack.of("decode-worker").incarnation)
        snapshot: KvSnapshot = await self._bus.request(
            subjects.control(worker), KvAsk(ended=8), KvSnapshot, timeout_s=60.0
        )
        name = f"{request.request_id}.{end.attempt}"
        (transfer,) = [one for one in snapshot.transfers if one.transfer_id == name]
        assert transfer.link == link
        return Handed(self._client.delivered[request.request_id], transfer)

    async def replace(self, service: str, **settings: str) -> None:
        """Another worker in the place of the one there is."""
        for process in self.stack.processes:
            if process.service == service and process.popen.poll() is None:
                process.ask_to_stop()
                await asyncio.to_thread(process.stopped)
        started = self.stack.start(service, **settings)
        await asyncio.to_thread(started.wait_ready)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """Without workers: a test says which."""
    stack = LiveStack(tmp_path_factory.mktemp("stack"), patient=True)
    try:
        stack.start("scheduler").wait_ready()
        yield stack
    finally:
        stack.close()


@pytest.fixture
async def desk(fleet: LiveStack) -> AsyncIterator[Desk]:
    bus = await fleet.join()
    client = BusClient(bus, new_incarnation("gateway", Random()))
    await client.start()
    yield Desk(fleet, bus, client)
    await client.close()
    await bus.close()


async def test_each_codec_sends_as_much_less_as_it_says(desk: Desk) -> None:
    await desk.replace("decode-worker", KV_CODECS=ALL)
    await desk.replace("prefill-worker")
    raw = await desk.handed("tcp")
    assert raw.transfer.codec == "raw"
    assert raw.transfer.n_bytes >= PROMPT_TOKENS * 23_040
    for name, factor in SMALLER.items():
        await desk.replace("prefill-worker", KV_CODEC=name, KV_CODECS=f"raw,{name}")
        for link in ("tcp", "shm"):
            handed = await desk.handed(link)
            assert handed.transfer.codec == name
            smaller = raw.transfer.n_bytes / handed.transfer.n_bytes
            assert 0.9 * factor < smaller < 1.1 * factor, (name, link, smaller)
            assert len(handed.tokens) == ANSWER_TOKENS
            if name == "zstd":
                assert handed.tokens == raw.tokens


async def test_what_the_reader_does_not_list_comes_as_it_is(desk: Desk) -> None:
    await desk.replace("decode-worker", KV_CODECS=ALL)
    await desk.replace("prefill-worker", KV_CODEC="delta", KV_CODECS="raw,delta")
    lossy = await desk.handed("tcp")
    await desk.replace("decode-worker")
    raw = await desk.handed("tcp")
    assert (lossy.transfer.codec, raw.transfer.codec) == ("delta", "raw")
    assert raw.transfer.n_bytes > 3 * lossy.transfer.n_bytes
    assert raw.transfer.n_bytes >= PROMPT_TOKENS * 23_040

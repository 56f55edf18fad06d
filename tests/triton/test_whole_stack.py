"""Every service, with workers in front of real Triton servers, on real weights."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from diptych_testkit.bare_engine import BareEngine
from diptych_testkit.live_model import bare_engine, codec
from diptych_testkit.live_stack import MODEL, LiveStack, gguf_path
from diptych_testkit.triton_models.repository import Model
from diptych_testkit.triton_server import Installation, TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1800)]

QUESTION = [{"role": "user", "content": "Write a long story about a lighthouse keeper."}]
TOKENS = 120


@pytest.fixture(scope="module")
def bare() -> Iterator[BareEngine]:
    engine = bare_engine()
    yield engine
    engine.close()


class Fleet:
    """A stack whose prefill worker has one server, and each of its two decode workers another."""

    def __init__(self, folder: Path, installation: Installation, ending: ExitStack) -> None:
        self.folder = folder
        self.servers: list[TritonServer] = []
        for n, model in enumerate(("context", "generation", "generation")):
            (folder / f"server-{n}").mkdir()
            server = TritonServer(folder / f"server-{n}", installation, transceiver=folder / "kv")
            ending.callback(server.stop)
            self.servers.append(server.start([Model(name=model, gguf=str(gguf_path()))]))
        self.stack = LiveStack(folder, patient=True)
        ending.callback(self.stack.close)

    def start(self) -> None:
        services = ("prefill-worker", "decode-worker", "decode-worker")
        started = [
            self.stack.start(
                service,
                ENGINE="triton",
                ENGINE_URL=server.url,
                ENGINE_MODEL="context" if service == "prefill-worker" else "generation",
            )
            for service, server in zip(services, self.servers, strict=True)
        ]
        started += [self.stack.start(s) for s in ("scheduler", "power-governor", "gateway")]
        for server in self.servers:
            server.wait_ready()
        for process in started:
            process.wait_ready()
        self.stack.wait_for_model()

    def generates(self) -> TritonServer:
        """The server that has been asked for a generation last."""
        said = [s for s in self.servers if "generation_only" in s.log.read_text(errors="replace")]
        assert len(said) == 1, "one request, one generation"
        return said[0]


@pytest.fixture
def fleet(tmp_path: Path, installation: Installation) -> Iterator[Fleet]:
    with ExitStack() as ending:
        fleet = Fleet(tmp_path, installation, ending)
        fleet.start()
        yield fleet


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=fleet.stack.base_url, api_key="none", max_retries=0, timeout=400
    ) as client:
        yield client


class Streamed:
    """One streamed answer."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.text = ""
        self.chunks = 0
        self.told: dict[str, object] = {}
        self._grown = asyncio.Event()

    async def run(self) -> "Streamed":
        stream = await self._client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            if chunk.choices:
                self.text += chunk.choices[0].delta.content or ""
                self.chunks += 1
                self._grown.set()
            elif chunk.usage:
                self.told = chunk.usage.model_extra["diptych"]  # type: ignore[index]
        return self

    async def until(self, chunks: int) -> None:
        async with asyncio.timeout(240):
            while self.chunks < chunks:
                self._grown.clear()
                await self._grown.wait()


def expected(bare: BareEngine) -> str:
    answer = bare.answer(codec().encode_chat(QUESTION), TOKENS)
    return b"".join(codec().token_bytes(token) for token in answer).decode()


async def test_two_models_of_two_servers_answer_as_the_bare_engine_and_one_may_die(
    fleet: Fleet, client: openai.AsyncOpenAI, bare: BareEngine
) -> None:
    """Streamed by the stock client: whole; with the generation's server killed; with all killed."""
    right = await asyncio.to_thread(expected, bare)
    whole = await Streamed(client).run()
    assert whole.text == right
    assert whole.told["mode"] == "remote"
    assert whole.told["link"] == "engine"
    first = fleet.generates()

    others = [server for server in fleet.servers[1:] if server is not first]
    for server in fleet.servers:
        server.log.write_text("")
    stream = Streamed(client)
    async with asyncio.timeout(400), asyncio.TaskGroup() as group:
        running = group.create_task(stream.run())
        await stream.until(10)
        dying = fleet.generates()
        await asyncio.to_thread(dying.kill)
        await running
    assert stream.text == right
    assert stream.told["attempt"] != 1

    left = [server for server in (first, *others) if server is not dying]
    last = Streamed(client)
    async with asyncio.timeout(400):
        running = asyncio.create_task(last.run())
        await last.until(10)
        for server in (*left, fleet.servers[0]):
            await asyncio.to_thread(server.kill)
        with pytest.raises(openai.APIError):
            await running
    assert right.startswith(last.text)

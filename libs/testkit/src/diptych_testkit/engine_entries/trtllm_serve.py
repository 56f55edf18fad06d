"""TensorRT-LLM behind `trtllm-serve`: the HTTP adapter on the strict server that is not there."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from diptych_contracts.fleet import Role
from diptych_contracts.sampling import Stopping
from diptych_engine.request_loop import RequestLoop
from diptych_engine.sim_card import sim_card
from diptych_engine.tensorrt_llm.options import ServeOptions
from diptych_engine.tensorrt_llm.serve import TrtLlmServe
from diptych_testkit import fake_tensorrt_llm as fake
from diptych_testkit.engine_entries.tensorrt_llm import ORPHAN_MS, TIMES, VOCAB, suite_served
from diptych_testkit.engine_pairs import Abilities, EngineEntry, EnginePair
from diptych_testkit.fake_trtllm_serve import FakeServe
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec


@contextmanager
def _listening(server: FakeServe) -> Iterator[None]:
    """The server on a loop of its own, as it is a process of its own."""
    up, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def listen() -> None:
        async with server.running():
            up.set()
            await over.wait()

    def run() -> None:
        loop.run_until_complete(listen())
        loop.close()

    thread = threading.Thread(target=run, name="trtllm-serve", daemon=True)
    thread.start()
    assert up.wait(60)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)


@contextmanager
def _pair(version: str) -> Iterator[EnginePair]:
    codec = TextCodec.from_card(sim_card(model="toy"))

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    world, faults = fake.World(), fake.Faults(step_s=0.001)
    installed = [fake.at(version, world=world, faults=faults, vocab_size=VOCAB) for _ in range(2)]
    servers = [FakeServe(one, kv_transfer_timeout_ms=ORPHAN_MS) for one in installed]

    def kill() -> None:
        faults.dead = True

    def held() -> int:
        running: int = sum(server.llm.active for server in servers)
        return running + len(world.tickets) + len(world.leaks)

    with ExitStack() as stack:
        loops = []
        for server, role in zip(servers, (Role.PREFILL, Role.DECODE), strict=True):
            stack.enter_context(_listening(server))
            options = ServeOptions(
                kv_transfer_timeout_ms=ORPHAN_MS, tokens_per_block=4, connect_s=60.0
            )
            engine = TrtLlmServe(suite_served(role), options, url=server.url)
            loops.append(RequestLoop(engine, answer_text, times=TIMES))
            stack.callback(loops[-1].stop)
        yield EnginePair(loops[0], loops[1], codec, kill=kill, held=held)
        assert world.misuse == []


ENTRIES = [
    EngineEntry(
        name="trtllm_serve",
        open=partial(_pair, "1.3.0"),
        can=Abilities(logit_bias=False, logprobs=False),
    )
]

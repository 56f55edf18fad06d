"""TensorRT-LLM: its adapter on the strict fake of the LLM API, in both of its versions."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from diptych_contracts.cards import Fingerprint
from diptych_contracts.fleet import Role
from diptych_contracts.sampling import Stopping
from diptych_engine.request_loop import RequestLoop
from diptych_engine.request_watch import WatchTimes
from diptych_engine.sim_card import EOS_ID, sim_card
from diptych_engine.tensorrt_llm.engine import TrtLlmEngine
from diptych_engine.tensorrt_llm.options import LlmOptions
from diptych_engine.tensorrt_llm.served import Served
from diptych_testkit import fake_tensorrt_llm as fake
from diptych_testkit.engine_pairs import Abilities, EngineEntry, EnginePair
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

TIMES = WatchTimes(health_s=0.05, answer_s=30.0, stats_s=0.5)
VOCAB = 260
ORPHAN_MS = 10_000
"""Long enough for eight prompts before the first of them is fetched, on a busy machine."""


def suite_served(role: Role) -> Served:
    """The toy model of the suite, which speaks the tokens of the simulated card."""
    return Served(
        checkpoint="toy",
        fingerprint=Fingerprint(base="toy", weights="trtllm:toy:auto"),
        role=role,
        context_tokens=4096,
        vocab_size=VOCAB,
        eos_ids=(EOS_ID,),
        max_sequences=16,
    )


@contextmanager
def _pair(version: str) -> Iterator[EnginePair]:
    codec = TextCodec.from_card(sim_card(model="toy"))

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    world, faults = fake.World(), fake.Faults(step_s=0.001)
    loops, installed = [], []
    for role in (Role.PREFILL, Role.DECODE):
        installed.append(fake.at(version, world=world, faults=faults, vocab_size=VOCAB))
        options = LlmOptions(kv_transfer_timeout_ms=ORPHAN_MS, tokens_per_block=4)
        engine = TrtLlmEngine(suite_served(role), options, importer=installed[-1].importer)
        loops.append(RequestLoop(engine, answer_text, times=TIMES))

    def kill() -> None:
        faults.dead = True

    def held() -> int:
        running = sum(llm.active for one in installed for llm in one.llms)
        return running + len(world.tickets) + len(world.leaks)

    try:
        yield EnginePair(loops[0], loops[1], codec, kill=kill, held=held)
        assert world.misuse == []
    finally:
        for loop in loops:
            loop.stop()


ENTRIES = [
    EngineEntry(
        name=f"tensorrt_llm-{version}",
        open=partial(_pair, version),
        can=Abilities(logit_bias=False),
    )
    for version in ("1.2.1", "1.3.0")
]

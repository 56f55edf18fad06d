"""vLLM, as its contract says it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from diptych_engine.request_loop import RequestLoop
from diptych_engine.sim_card import sim_card
from diptych_engine.vllm.engine import VllmEngine
from diptych_engine.vllm.options import VllmOptions
from diptych_testkit.engine_pairs import EngineEntry, EnginePair
from diptych_testkit.fake_engines.loops import QUICK, answer_texts
from diptych_testkit.fake_engines.vllm import FakeNixl, FakeVllm, VllmHabits
from diptych_testkit.fake_engines.works import adapter_settings
from diptych_text.codec import TextCodec

_LEASE_S = 3.0


@contextmanager
def vllm_pair(*, token_level: bool) -> Iterator[EnginePair]:
    """Two servers that take nothing but the contract; raises at the end what they found wrong."""
    card = sim_card(model="toy")
    codec = TextCodec.from_card(card)
    nixl = FakeNixl()
    habits = VllmHabits(
        vocab_size=card.vocab_size,
        first_token=3,
        step_s=0.002,
        context_tokens=card.context_tokens,
        token_level=token_level,
        lease_s=_LEASE_S,
    )
    servers = [FakeVllm(nixl, habits) for _ in range(2)]
    for server in servers:
        server.start()
    options = VllmOptions(start_s=60.0, lease_s=_LEASE_S)
    loops = [
        RequestLoop(
            VllmEngine(adapter_settings("vllm", s.url, card=card, max_sequences=16), options),
            answer_texts(codec),
            times=QUICK,
        )
        for s in servers
    ]

    def kill() -> None:
        for server in servers:
            server.die()

    def held() -> int:
        return nixl.pinned() + sum(server.running for server in servers)

    try:
        yield EnginePair(loops[0], loops[1], codec, kill=kill, held=held)
    finally:
        for loop in loops:
            loop.stop()
        for server in servers:
            server.stop()
    assert [fault for server in servers for fault in server.faults] == []


ENTRIES = [
    EngineEntry(name="vllm", open=partial(vllm_pair, token_level=False)),
    EngineEntry(name="vllm-tokens", open=partial(vllm_pair, token_level=True)),
]

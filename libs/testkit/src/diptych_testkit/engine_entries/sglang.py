"""SGLang, as its contract says it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from diptych_contracts.fleet import Role
from diptych_engine.request_loop import RequestLoop
from diptych_engine.sglang.engine import SglangEngine
from diptych_engine.sglang.options import SglangOptions
from diptych_engine.sim_card import sim_card
from diptych_testkit.engine_pairs import Abilities, EngineEntry, EnginePair
from diptych_testkit.fake_engines.loops import QUICK, answer_texts
from diptych_testkit.fake_engines.sglang import FakeBootstrap, FakeSglang, SglangHabits
from diptych_testkit.fake_engines.works import adapter_settings
from diptych_text.codec import TextCodec


@contextmanager
def sglang_pair(*, cumulative: bool) -> Iterator[EnginePair]:
    """Two servers that take nothing but the contract; raises at the end what they found wrong."""
    card = sim_card(model="toy")
    codec = TextCodec.from_card(card)
    bootstrap = FakeBootstrap()

    def server(mode: str) -> FakeSglang:
        habits = SglangHabits(
            mode=mode,
            vocab_size=card.vocab_size,
            first_token=3,
            step_s=0.002,
            cumulative=cumulative,
        )
        return FakeSglang(bootstrap, habits)

    servers = [server("prefill"), server("decode")]
    for one in (bootstrap, *servers):
        one.start()
    options = SglangOptions(start_s=60.0, prefill_url=servers[0].url, bootstrap_port=bootstrap.port)
    loops = [
        RequestLoop(
            SglangEngine(
                adapter_settings("sglang", s.url, card=card, role=role, max_sequences=16), options
            ),
            answer_texts(codec),
            times=QUICK,
        )
        for s, role in zip(servers, (Role.PREFILL, Role.DECODE), strict=True)
    ]

    def kill() -> None:
        for one in servers:
            one.die()

    def held() -> int:
        return bootstrap.holding() + sum(one.running for one in servers)

    try:
        yield EnginePair(loops[0], loops[1], codec, kill=kill, held=held)
    finally:
        for loop in loops:
            loop.stop()
        for one in (bootstrap, *servers):
            one.stop()
    assert [fault for one in (bootstrap, *servers) for fault in one.faults] == []


_CAN = Abilities(prefill_ends=False)
ENTRIES = [
    EngineEntry(name="sglang", open=partial(sglang_pair, cumulative=True), can=_CAN),
    EngineEntry(name="sglang-increments", open=partial(sglang_pair, cumulative=False), can=_CAN),
]

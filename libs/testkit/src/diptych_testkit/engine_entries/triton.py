"""A real Triton server, whose context and generation models hand over to each other."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from diptych_contracts.fleet import Role
from diptych_contracts.sampling import Stopping
from diptych_engine.adapters import AdapterSettings, make_engine
from diptych_engine.request_loop import RequestLoop
from diptych_engine.request_watch import WatchTimes
from diptych_engine.sim_card import sim_card
from diptych_testkit.engine_pairs import Abilities, EngineEntry, EnginePair
from diptych_testkit.triton_models.repository import Model
from diptych_testkit.triton_server import Installation, TritonServer
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

_SOURCE = Path(__file__).parents[5] / "tests/triton"
_STEP_S = 0.002
_TIMES = WatchTimes(health_s=0.5, answer_s=20.0)


@contextmanager
def triton_pair(*, first_token: str) -> Iterator[EnginePair]:
    """A server of its own, and an adapter in front of each of its models."""
    installation = Installation(_SOURCE)
    installation.install()
    card = sim_card(model="sim")
    codec = TextCodec.from_card(card)

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = TritonServer(folder, installation, transceiver=folder / "kv")
        models = ("context", "generation")
        server.start([Model(name=model, step_s=_STEP_S) for model in models])
        loops: list[RequestLoop] = []
        try:
            server.wait_ready()
            for model in models:
                settings = AdapterSettings(
                    name="triton",
                    card=card,
                    role=Role.PREFILL if model == "context" else Role.DECODE,
                    url=server.url,
                    engine_model=model,
                    options={"first_token": first_token, "probe_s": 15.0, "let_go_s": 15.0},
                    kv_tokens=1 << 18,
                    max_sequences=16,
                )
                loops.append(RequestLoop(make_engine(settings), answer_text, times=_TIMES))
            yield EnginePair(loops[0], loops[1], codec, kill=server.kill)
        finally:
            for loop in loops:
                loop.stop()
            server.stop()


ENTRIES = [
    EngineEntry(
        name=f"triton-{first_token}-first",
        open=partial(triton_pair, first_token=first_token),
        can=Abilities(logit_bias=False, logprobs=False),
        marker="triton",
    )
    for first_token in ("prefill", "decode")
]

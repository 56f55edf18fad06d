"""The toy that schedules requests itself, with each rule of handing over."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

from diptych_contracts.handoffs import FirstToken
from diptych_contracts.sampling import Stopping
from diptych_engine.request_loop import RequestLoop
from diptych_engine.request_watch import WatchTimes
from diptych_engine.sim_card import sim_card
from diptych_testkit.engine_pairs import Abilities, EngineEntry, EnginePair
from diptych_testkit.toy_request_engine import Faults, ToyRequestEngine, ToySettings, Wire
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

_TIMES = WatchTimes(health_s=0.05, answer_s=60.0, stats_s=0.02)


@cache
def _codec() -> TextCodec:
    return TextCodec.from_card(sim_card(model="toy"))


@contextmanager
def toy_pair(settings: ToySettings, faults: Faults | None = None) -> Iterator[EnginePair]:
    """A pair of toys, both of which have the same `faults`."""
    codec = _codec()

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    wire = Wire()
    toys = [ToyRequestEngine(settings, wire=wire) for _ in range(2)]
    for toy in toys:
        toy.faults = faults or toy.faults
    loops = [RequestLoop(toy, answer_text, times=_TIMES) for toy in toys]

    def kill() -> None:
        for toy in toys:
            toy.faults.dead = "the toy was killed"

    def held() -> int:
        return sum(len(toy.held) for toy in toys) + len(wire.pinned)

    try:
        yield EnginePair(loops[0], loops[1], codec, kill=kill, held=held)
    finally:
        for loop in loops:
            loop.stop()


def settings(**changes: object) -> ToySettings:
    """A toy of the suite."""
    base: dict[str, object] = {"vocab_size": 260, "token_s": 0.001, "orphan_ms": 3000}
    return ToySettings(**(base | changes))  # type: ignore[arg-type]


_ALL = {
    "toy-prefill-first": settings(),
    "toy-decode-first": settings(first_token=FirstToken.DECODE),
    "toy-up-front": settings(first_token=FirstToken.DECODE, pair_up_front=True),
    "toy-drafting": settings(delta_tokens=5),
}
ENTRIES = [
    EngineEntry(name=name, open=partial(toy_pair, toy), can=Abilities(logprobs=False))
    for name, toy in _ALL.items()
]

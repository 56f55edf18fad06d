"""The simulated engine, whose KV Diptych moves: blocks go through memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from diptych_contracts.sampling import Stopping
from diptych_engine.sim import SimSettings, SimStepEngine
from diptych_engine.sim_card import sim_card
from diptych_engine.step_loop import StepLoop
from diptych_testkit.engine_pairs import Abilities, EngineEntry, EnginePair
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

_BYTES = range(3, 259)
"""Its tokens of one byte: half of them are parts of characters."""


@contextmanager
def _pair(draft_tokens: int = 0) -> Iterator[EnginePair]:
    card = sim_card(model="sim")
    codec = TextCodec.from_card(card)

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    settings = SimSettings(
        spoken=_BYTES,
        vocab_size=card.vocab_size,
        eos_ids=card.eos_ids,
        fingerprint=card.fingerprint,
        draft_tokens=draft_tokens,
    )
    loops = [StepLoop(SimStepEngine(settings), answer_text) for _ in range(2)]
    try:
        yield EnginePair(loops[0], loops[1], codec)
    finally:
        for loop in loops:
            loop.stop()


ENTRIES = [
    EngineEntry(name="sim", open=partial(_pair), can=Abilities()),
    EngineEntry(name="sim-drafting", open=partial(_pair, 4), can=Abilities()),
]

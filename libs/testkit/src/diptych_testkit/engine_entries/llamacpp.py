"""llama.cpp on real weights (DIPTYCH_TEST_GGUF), whose KV Diptych moves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from diptych_contracts.sampling import Stopping
from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.llamacpp import LlamaCppEngine, LlamaCppSettings
from diptych_engine.step_loop import StepLoop
from diptych_testkit.engine_pairs import Abilities, EngineEntry, EnginePair
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

_CACHED = "~/.cache/diptych/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
_SETTINGS = LlamaCppSettings(threads=2, kv_tokens=4096, max_sequences=16, context_tokens=1024)


@contextmanager
def _pair() -> Iterator[EnginePair]:
    weights = Path(os.environ.get("DIPTYCH_TEST_GGUF") or _CACHED).expanduser()
    card = card_from_gguf(weights, model="smollm2-135m")
    codec = TextCodec.from_card(card)

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    loops: list[StepLoop] = []
    try:
        loops += [StepLoop(LlamaCppEngine(weights, card, _SETTINGS), answer_text)]
        loops += [StepLoop(LlamaCppEngine(weights, card, _SETTINGS), answer_text)]
        yield EnginePair(loops[0], loops[1], codec)
    finally:
        for loop in loops:
            loop.stop()


ENTRIES = [
    EngineEntry(
        name="llamacpp",
        open=partial(_pair),
        can=Abilities(answer_tokens=12),
        marker="live",
    )
]

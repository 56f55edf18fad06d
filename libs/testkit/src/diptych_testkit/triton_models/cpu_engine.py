"""The engine behind a served model: llama.cpp on real weights, or the simulated one."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import ModelCard
from diptych_contracts.sampling import Stopping
from diptych_engine.port import Engine, StepInput
from diptych_engine.sim import SimSettings, SimStepEngine
from diptych_engine.sim_card import spoken_tokens
from diptych_engine.step_loop import StepLoop
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec
from diptych_worker.assembling import load_engine, read_card
from diptych_worker.settings import WorkerSettings

KV_TOKENS = 8192
MAX_SEQUENCES = 64


class PacedEngine(SimStepEngine):
    """The simulated engine, whose steps take time."""

    def __init__(self, settings: SimSettings, *, step_s: float) -> None:
        super().__init__(settings)
        self._step_s = step_s

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        time.sleep(self._step_s)
        return super().step(inputs)


def card_of(gguf: str, model: str) -> ModelCard:
    """The card of the weights at `gguf`; of the simulated engine where that is empty."""
    return read_card(_settings(gguf, model))


def engine_of(gguf: str, card: ModelCard, *, step_s: float = 0.0) -> Engine:
    """The engine for `card`; `step_s` is what a step of the simulated one takes."""
    if gguf:
        return load_engine(_settings(gguf, card.model), card)
    codec = TextCodec.from_card(card)
    settings = SimSettings(
        spoken=spoken_tokens(codec),
        vocab_size=card.vocab_size,
        eos_ids=card.eos_ids,
        fingerprint=card.fingerprint,
        context_tokens=card.context_tokens,
        kv_tokens=KV_TOKENS * 4,
        max_sequences=MAX_SEQUENCES,
    )

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    return StepLoop(PacedEngine(settings, step_s=step_s), answer_text)


def _settings(gguf: str, model: str) -> WorkerSettings:
    return WorkerSettings(
        engine="llamacpp" if gguf else "sim",
        model_path=Path(gguf),
        model=model,
        threads=1,
        kv_tokens=KV_TOKENS,
        prefix_cache=False,
    )


def parameters_of(config: Mapping[str, Mapping[str, Mapping[str, str]]]) -> dict[str, str]:
    """The parameters of a model's configuration."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}

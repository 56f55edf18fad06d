"""`python -m diptych_testkit.mortal_worker prefill-worker`: a worker whose engine can be killed.

It runs the `sim` engine at a pace of its own, and aborts as an engine's failed assertion does: at
once when it computes `AT_ONCE`, or once `AFTER_TOKENS` more tokens follow `LATER`. Of `ALOUD` it
dies as Python does, of an exception that repeats what it saw.
"""

import os
import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diptych_chassis.member import Member
from diptych_chassis.running import run
from diptych_chassis.settings import read_settings
from diptych_contracts.cards import ModelCard
from diptych_contracts.fleet import Role
from diptych_contracts.sampling import Stopping
from diptych_engine.matching import Grammars
from diptych_engine.port import StepInput
from diptych_engine.sim import SimSettings, SimStepEngine
from diptych_engine.sim_card import spoken_tokens
from diptych_engine.step_loop import StepLoop
from diptych_power.sim import SimulatedDevice
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec
from diptych_worker.assembling import read_card, run_worker
from diptych_worker.device import Equipment
from diptych_worker.settings import WorkerSettings

MODULE = "diptych_testkit.mortal_worker"
AT_ONCE = "KABOOM!"
LATER = "TICKTOCK"
ALOUD = "KRAKATOA"
AFTER_TOKENS = 60
"""More than a chat template puts behind it, so some of the answer is out by then."""
STEP_S = 0.008


class MortalEngine(SimStepEngine):
    """A `sim` engine that dies of two words."""

    def __init__(
        self, settings: SimSettings, *, at_once: list[int], later: list[int], aloud: list[int]
    ) -> None:
        super().__init__(settings)
        self._aloud = aloud
        self._at_once = at_once
        self._later = later

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        """Compute one batch, if it is survived."""
        time.sleep(STEP_S)
        rows = super().step(inputs)
        if any(_place(self._aloud, self._tokens(run)) is not None for run in inputs):
            raise KeyError(ALOUD)
        if any(self._deadly(run) for run in inputs):
            os.abort()
        return rows

    def _deadly(self, run: StepInput) -> bool:
        tokens = self._tokens(run)
        later = _place(self._later, tokens)
        ticked = later is not None and len(tokens) - later > AFTER_TOKENS
        return ticked or _place(self._at_once, tokens) is not None

    def _tokens(self, run: StepInput) -> list[int]:
        return self._sequence(run.seq).history.tokens


def _place(word: list[int], tokens: list[int]) -> int | None:
    """Where `word` ends in `tokens`."""
    for end in range(len(word), len(tokens) + 1):
        if tokens[end - 1] == word[-1] and tokens[end - len(word) : end] == word:
            return end
    return None


def load_engine(settings: WorkerSettings, card: ModelCard) -> StepLoop:
    """The engine and its loop."""
    codec = TextCodec.from_card(card)

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    sim = SimSettings(
        spoken=spoken_tokens(codec),
        vocab_size=card.vocab_size,
        eos_ids=card.eos_ids,
        fingerprint=card.fingerprint,
        context_tokens=card.context_tokens,
        kv_tokens=settings.kv_tokens,
        max_sequences=settings.max_sequences,
    )
    engine = MortalEngine(
        sim,
        at_once=codec.encode(AT_ONCE, add_bos=False),
        later=codec.encode(LATER, add_bos=False),
        aloud=codec.encode(ALOUD, add_bos=False),
    )
    return StepLoop(engine, answer_text, grammars=Grammars(codec, card.eos_ids))


async def serve(member: Member, settings: WorkerSettings, role: Role) -> None:
    """Run until `member` is told to stop."""
    card = read_card(settings)
    engine = load_engine(settings, card)
    await run_worker(member, settings, role, card=card, on=Equipment(engine, SimulatedDevice()))


def main(service: str) -> int:
    """Run as `service`; gives the exit code."""
    settings = read_settings(WorkerSettings, service, os.environ)
    role = Role(service.removesuffix("-worker"))
    return run(service, settings, lambda member: serve(member, settings, role))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""The `sim` engine as a test double: it can be watched, held up, and made to end an answer."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import Fingerprint
from diptych_contracts.sampling import Sampling
from diptych_engine.port import StepInput
from diptych_engine.sampling import sample
from diptych_engine.sim import History, SimSettings, SimStepEngine, likeliest_after

EOS_ID = 0
GREEDY = Sampling(temperature=0.0)


def toy_next(history: Sequence[int], *, vocab_size: int = 1000) -> int:
    """The token a `ToyStepEngine` finds likeliest after `history`; never `EOS_ID`."""
    return likeliest_after(History(history), range(1, vocab_size))


def toy_answer(
    prompt_ids: Sequence[int],
    n_tokens: int,
    *,
    vocab_size: int = 1000,
    sampling: Sampling = GREEDY,
) -> list[int]:
    """The answer of `n_tokens` to a prompt, greedy unless `sampling` says otherwise."""
    history, row = History(prompt_ids), np.empty(vocab_size, np.float32)
    for _ in range(n_tokens):
        if sampling.temperature == 0:
            token = likeliest_after(history, range(1, vocab_size))
        else:
            toy_logits(row, history)
            answer = history.tokens[len(prompt_ids) :]
            token = sample(row, sampling, prompt_ids=prompt_ids, answer_ids=answer)
        history.tokens.append(token)
    return history.tokens[len(prompt_ids) :]


def toy_logits(row: NDArray[np.float32], history: History) -> None:
    """Write what a `ToyStepEngine` finds of each token into `row` `[vocab]`; `EOS_ID` unlikely."""
    likeliest = likeliest_after(history, range(1, len(row)))
    rng = np.random.Generator(np.random.Philox(likeliest))
    row[:] = rng.standard_normal(len(row), np.float32)
    row[EOS_ID] = -10.0
    row[likeliest] = 10.0


class ToyStepEngine(SimStepEngine):
    """A deterministic `StepEngine` whose less likely tokens differ too, as a model's do.

    Args:
        vocab_size, block_tokens, context_tokens, kv_tokens, max_sequences, prefix_sequences,
            prefix_tokens: As in `EngineSpec`.
        eos_at: Length of a sequence after which end-of-text is the likeliest token; None: never.
        on_step: Called with each batch before it is computed: to count, to raise.
        step_s: What a step takes, in virtual time too.
        draft_tokens: As in `SimSettings`.
    """

    def __init__(  # noqa: PLR0913 - a test names the one it means
        self,
        *,
        vocab_size: int = 1000,
        block_tokens: int = 64,
        context_tokens: int = 4096,
        kv_tokens: int = 16_384,
        max_sequences: int = 16,
        prefix_sequences: int = 0,
        prefix_tokens: int = 16_384,
        eos_at: int | None = None,
        on_step: Callable[[Sequence[StepInput]], None] | None = None,
        step_s: float = 0.0,
        draft_tokens: int = 0,
    ) -> None:
        settings = SimSettings(
            spoken=range(1, vocab_size),
            vocab_size=vocab_size,
            eos_ids=(EOS_ID,),
            fingerprint=Fingerprint(base="toy", weights="none"),
            context_tokens=context_tokens,
            kv_tokens=kv_tokens,
            max_sequences=max_sequences,
            prefix_sequences=prefix_sequences,
            prefix_tokens=prefix_tokens,
            block_tokens=block_tokens,
            draft_tokens=draft_tokens,
        )
        super().__init__(settings)
        self.steps = 0
        self.tokens_computed = 0
        self._eos_at = eos_at
        self._on_step = on_step
        self.step_s = step_s
        self.in_real_time = True
        """Whether a step itself waits for `step_s`."""

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        if self._on_step is not None:
            self._on_step(inputs)
        if self.step_s and self.in_real_time:
            time.sleep(self.step_s)
        rows = super().step(inputs)
        self.steps += 1
        self.tokens_computed += sum(len(run.token_ids) for run in inputs)
        return rows

    def fill_logits(self, row: NDArray[np.float32], history: History) -> None:
        toy_logits(row, history)
        if self._eos_at is not None and len(history.tokens) >= self._eos_at:
            row[EOS_ID] = 20.0

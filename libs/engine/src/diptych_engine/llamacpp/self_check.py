"""One prompt, decoded before anything is served.

A library that does not fit its declarations may load, pass the comparison of defaults, and compute
nonsense. For a model whose file is known the greedy answer is known too; for any other, logits must
be finite and the same twice.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diptych_contracts.errors import Incompatible
from diptych_engine.port import StepEngine, StepInput


class KnownAnswer(NamedTuple):
    """A model file, by size and SHA-256, and how it goes on from a prompt."""

    n_bytes: int
    sha256: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


SMOLLM2_135M_Q4_1 = KnownAnswer(
    n_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # "1, 2, 3, 4, 5, " goes on with "6, 7, 8,"; each token leads by more than 3 logits, so other
    # CPUs, which round differently, agree.
    prompt_ids=(33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216),
    answer_ids=(38, 28, 216, 39, 28, 216, 40, 28),
)
KNOWN = (SMOLLM2_135M_Q4_1,)

_PROMPT_IDS = tuple(range(1, 12))
_ANSWER_TOKENS = 4


def check_decoding(engine: StepEngine, path: Path, vocab_size: int) -> None:
    """Decode one prompt greedily and judge the answer.

    Raises:
        Incompatible: if logits are not finite, not reproducible, or not those known for the file.
    """
    known = _known(path)
    prompt = known.prompt_ids if known else tuple(i % vocab_size for i in _PROMPT_IDS)
    n_tokens = len(known.answer_ids) if known else _ANSWER_TOKENS
    first = _greedy(engine, prompt, n_tokens)
    again = _greedy(engine, prompt, n_tokens)
    if first != again:
        raise Incompatible(f"self-check of {path.name}: decoded {first}, then {again}")
    if known and first != known.answer_ids:
        raise Incompatible(
            f"self-check of {path.name}: expected {known.answer_ids}, decoded {first}; "
            "does the library match its declarations?"
        )


def _known(path: Path) -> KnownAnswer | None:
    n_bytes = path.stat().st_size
    for known in KNOWN:
        if known.n_bytes == n_bytes:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == known.sha256:
                    return known
    return None


def _greedy(engine: StepEngine, prompt: Sequence[int], n_tokens: int) -> tuple[int, ...]:
    answer: list[int] = []
    run, position = prompt, 0
    while len(answer) < n_tokens:
        (logits,) = engine.step([StepInput(0, position, run, want_logits=True)])
        if logits is None or not np.isfinite(logits).all():
            raise Incompatible("self-check: the model computed logits that are not finite")
        position += len(run)
        run = [int(logits.argmax())]
        answer += run
    engine.drop(0)
    return tuple(answer)

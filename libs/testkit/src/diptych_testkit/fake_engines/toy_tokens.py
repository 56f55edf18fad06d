"""Tokens of a toy model, as `toy_engine` makes them: greedy answers equal `toy_answer`."""

import hashlib
from collections.abc import Sequence

from diptych_engine.sim import History, likeliest_after
from diptych_testkit.toy_engine import EOS_ID


class ToyTokens:
    """Answers one request.

    Args:
        context: The prompt.
        vocab_size: Of the model.
        temperature: 0: the likeliest token; else one that the seed chooses.
        seed: Chooses.
        eos_at: Length from which on the model ends its answer; None: never.
    """

    def __init__(
        self,
        context: Sequence[int],
        *,
        vocab_size: int,
        temperature: float = 0.0,
        seed: int = 0,
        eos_at: int | None = None,
    ) -> None:
        self._history = History(context)
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._seed = seed
        self._eos_at = eos_at
        self._made = 0

    def next(self) -> int:
        """The token that follows."""
        token = likeliest_after(self._history, range(1, self._vocab_size))
        if self._temperature > 0:
            digest = hashlib.blake2b(f"{self._seed}:{self._made}".encode(), digest_size=2)
            token = 1 + (token + int.from_bytes(digest.digest(), "little")) % (self._vocab_size - 1)
        if self._eos_at is not None and len(self._history.tokens) >= self._eos_at:
            token = EOS_ID
        self._history.tokens.append(token)
        self._made += 1
        return token


def toy_logprob(token: int, rank: int = 0) -> float:
    """What the toy model says of a token: the same for both engines."""
    return -0.125 * (token % 8) - rank

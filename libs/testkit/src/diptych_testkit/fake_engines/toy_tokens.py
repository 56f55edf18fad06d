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
        first_token: Those below are never said.
        forced: What a bias of 100 leaves to be said; None: there is none.
    """

    def __init__(  # noqa: PLR0913 - a model has many knobs
        self,
        context: Sequence[int],
        *,
        vocab_size: int,
        temperature: float = 0.0,
        seed: int = 0,
        eos_at: int | None = None,
        first_token: int = 1,
        forced: int | None = None,
    ) -> None:
        self._history = History(context)
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._seed = seed
        self._eos_at = eos_at
        self._first_token = first_token
        self._forced = forced
        self._made = 0

    def next(self) -> int:
        """The token that follows."""
        first, spoken = self._first_token, self._vocab_size - self._first_token
        token = likeliest_after(self._history, range(first, self._vocab_size))
        if self._temperature > 0:
            digest = hashlib.blake2b(f"{self._seed}:{self._made}".encode(), digest_size=2)
            token = first + (token + int.from_bytes(digest.digest(), "little")) % spoken
        if self._eos_at is not None and len(self._history.tokens) >= self._eos_at:
            token = EOS_ID
        if self._forced is not None:
            token = self._forced
        self._history.tokens.append(token)
        self._made += 1
        return token


def forced_by(logit_bias: dict[str, float]) -> int | None:
    """The token whose bias leaves no other."""
    return next((int(token) for token, bias in logit_bias.items() if bias >= 100), None)


def toy_logprob(token: int, rank: int = 0) -> float:
    """What the toy model says of a token: the same for both engines."""
    return -0.125 * (token % 8) - rank

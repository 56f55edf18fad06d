"""Going on with an answer that has begun, at an engine that takes its tokens for a prompt."""

import hashlib

from diptych_contracts.errors import Refused
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.sampling import Sampling
from diptych_engine.port import SequenceWork

_INT64 = 1 << 64


def see_grammar_begins(work: SequenceWork) -> None:
    """An engine follows a grammar from the first token it makes, not from the answer's first.

    Raises:
        Refused: the answer has begun, so that another kind of engine must go on with it.
    """
    if work.answer_ids:
        raise Refused(
            RefusalReason.UNSUPPORTED,
            "an answer with a grammar has begun, and this engine cannot go on within one",
        )


def seed_after(sampling: Sampling, n_tokens: int) -> int:
    """The seed of an answer's rest: an engine begins its random numbers anew with each request."""
    if n_tokens == 0:
        return sampling.seed
    digest = hashlib.blake2b(f"{sampling.seed}:{n_tokens}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def signed(seed: int) -> int:
    """64 bits as the signed number that engines take."""
    seed %= _INT64
    return seed - _INT64 if seed >= _INT64 // 2 else seed

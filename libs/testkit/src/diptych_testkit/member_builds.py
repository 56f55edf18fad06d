"""What a small fleet's workers can do beside answering: a plan's choice, the same for one seed."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Build:
    """One worker's engine and settings; as it is, everything of choice is off."""

    max_sequences: int = 4
    kv_tokens: int = 1024
    transfer_slots: int = 12
    block_tokens: int = 64
    prefix_sequences: int = 0
    prefix_tokens: int = 0
    draft_tokens: int = 0
    kv_reuse: bool = False
    parking_bytes: int = 0


PLAIN = Build()
BLOCK_TOKENS = 16
"""Of builds that `chosen` gives: short, so that a few prompts fill what is kept."""


def chosen(rng: Random, *, parks: bool) -> tuple[Build, Build]:
    """The builds of prefill and of decode workers; those that park have few seats."""
    reuses = rng.random() < 0.7
    prefill, decode = _caching(rng), _caching(rng)
    return _built(rng, prefill), _built(
        rng,
        decode if reuses else (0, 0),
        seats=1 if parks else rng.choice((2, 4)),
        parking_bytes=1 << 18 if parks else 0,
    )


def _caching(rng: Random) -> tuple[int, int]:
    return rng.choice((0, 1, 2, 4)), BLOCK_TOKENS * rng.choice((4, 10, 40))


def _built(rng: Random, kept: tuple[int, int], *, seats: int = 4, parking_bytes: int = 0) -> Build:
    sequences, tokens = kept
    return Build(
        max_sequences=seats,
        kv_tokens=rng.choice((512, 512, 1024)),
        transfer_slots=rng.choice((24, 40)),
        block_tokens=BLOCK_TOKENS,
        prefix_sequences=sequences,
        prefix_tokens=tokens if sequences else 0,
        draft_tokens=rng.choice((0, 2, 8)),
        kv_reuse=sequences > 0,
        parking_bytes=parking_bytes,
    )

"""Whose joules they are. Pure."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def split_j(energy_j: float, tokens_by_key: Mapping[K, int]) -> dict[K, float]:
    """A step's energy, split by the tokens computed for each sequence. The shares sum to it."""
    tokens = sum(tokens_by_key.values())
    if not tokens:
        return {}
    return {key: energy_j * count / tokens for key, count in tokens_by_key.items()}

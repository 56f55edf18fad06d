"""The port of what makes vectors of texts."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Embedder(Protocol):
    """Makes vectors, of one text at a time, with KV of its own. Used on the engine's thread."""

    size: int
    """Numbers in a vector."""
    max_tokens: int
    """Longest text."""
    chunk_tokens: int
    """Most tokens it is fed at once."""

    def begin(self) -> None:
        """Forget the text before."""
        ...

    def feed(self, token_ids: Sequence[int]) -> None:
        """Compute the next tokens of the text."""
        ...

    def vector(self) -> NDArray[np.float32]:
        """The vector `[size]` of all that was fed, of length 1."""
        ...

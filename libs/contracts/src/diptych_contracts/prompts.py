"""A long prompt: kept once in object bucket `prompts`, named by everybody who works on it.

A message of the bus holds 3.9 MB; a prompt may be longer, and every job of every attempt would
carry it again. The object is stored before its request and erased with it.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

from diptych_contracts.errors import Unverified
from diptych_contracts.wire import Message

MAX_INLINE_TOKENS = 65_536
"""Longest prompt that its messages hold themselves: 64 to 320 KiB, by the size of its ids."""
MAX_KNOWN_BLOCKS = 1024
"""Blocks whose hashes a reference names: 9 KiB, 65,536 tokens. Whoever routes sees no more."""

_WIDTHS = {1: "B", 2: "H", 4: "I"}


class PromptRef(Message, frozen=True, kw_only=True, tag="prompt_ref.1"):
    """Where a prompt is, and how to know it: object `name` holds its ids, `width` bytes each."""

    name: str
    tokens: int
    width: int
    """1, 2 or 4: unsigned, little-endian."""
    digest: str
    """SHA-256 of the object."""
    model_base: str = ""
    """`Fingerprint.base` of the model whose blocks are hashed."""
    block_tokens: int = 0
    block_hashes: tuple[int, ...] = ()
    """Of its first full blocks (`policy.prefixes`): who has them cached is the better place."""

    @property
    def n_bytes(self) -> int:
        """Size of the object."""
        return self.tokens * self.width


def compact(vocab_size: int, ids: Sequence[int] = ()) -> "array[int]":
    """`ids` of a model with `vocab_size` tokens, in the width that holds any of them."""
    width = next(width for width in _WIDTHS if vocab_size <= 1 << 8 * width)
    return array(_WIDTHS[width], ids)


def packed(ids: "array[int]") -> tuple[int, bytes]:
    """The width of `compact` ids, and the bytes of an object that holds them."""
    return ids.itemsize, _little_endian(ids).tobytes()


def unpacked(data: bytes, ref: PromptRef) -> Sequence[int]:
    """The ids that `ref` names, out of its object.

    Raises:
        Unverified: `data` is something else.
    """
    digest = digest_of(data)
    if len(data) != ref.n_bytes or digest != ref.digest or ref.width not in _WIDTHS:
        raise Unverified(
            f"prompt {ref.name}: expected {ref.n_bytes} bytes with digest {ref.digest:.12}, "
            f"got {len(data)} with {digest:.12}"
        )
    ids = array(_WIDTHS[ref.width])
    ids.frombytes(data)
    return _little_endian(ids)


def digest_of(data: bytes) -> str:
    """What `PromptRef.digest` says of `data`; 1 ms per MB."""
    return hashlib.sha256(data).hexdigest()


def _little_endian(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids

"""Blocks on a TLS connection: AES-256-GCM in pieces, under a key that crossed that TLS.

What is said (greetings, tickets, answers) goes through TLS; the blocks of a batch follow it as
pieces of at most 128 KiB, each sealed by itself. TLS would cut them into records of 16 KiB and
copy each four times, which cost 0.7 s of CPU per GB on either side; a piece is read and written
once, at 0.1 s per GB.

The writer draws the key for one connection, and nothing else is ever sealed with it. A piece's
nonce is its number on that connection, counted by both ends: one that is lost, doubled, moved or
altered does not open, and leaves nothing but zeros where it should have gone.
"""

import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from diptych_contracts.errors import LinkBroken

KEY_BYTES = 32
PIECE_BYTES = 1 << 17
"""Stays in a core's cache on its way from one buffer to the next."""
TAG_BYTES = 16
_NONCE = struct.Struct("<4xQ")
_AT_ONCE_BYTES = 2 * (PIECE_BYTES + TAG_BYTES)


def new_key() -> bytes:
    """For one connection."""
    return os.urandom(KEY_BYTES)


class Sealing:
    """The writer's end."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._number = 0
        self._room = memoryview(bytearray(_AT_ONCE_BYTES))

    def sealed(self, blocks: Sequence[memoryview]) -> Iterator[memoryview]:
        """What crosses for `blocks`, some pieces at a time: valid until the next are asked for."""
        filled = 0
        for block in blocks:
            for at in range(0, len(block), PIECE_BYTES):
                piece = block[at : at + PIECE_BYTES]
                end = filled + len(piece) + TAG_BYTES
                if end > _AT_ONCE_BYTES:
                    yield self._room[:filled]
                    filled, end = 0, len(piece) + TAG_BYTES
                nonce = _NONCE.pack(self._number)
                self._aead.encrypt_into(nonce, piece, None, self._room[filled:end])
                self._number += 1
                filled = end
        if filled:
            yield self._room[:filled]


class Opening:
    """The reader's end."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._number = 0
        self._expected: deque[int] = deque()

    def expect(self, sizes: Sequence[int]) -> None:
        """Next come blocks of these sizes."""
        for size in sizes:
            whole, rest = divmod(size, PIECE_BYTES)
            self._expected.extend([PIECE_BYTES] * whole + [rest] * (rest > 0))

    @property
    def next_bytes(self) -> int:
        """As long as the next piece is, sealed; 0 if none is to come."""
        return self._expected[0] + TAG_BYTES if self._expected else 0

    def open(self, sealed: memoryview, into: memoryview) -> int:
        """Verify the next piece and put it at the start of `into`; gives its length.

        Raises:
            LinkBroken: it was altered on its way, or is another one.
        """
        n_bytes = self._expected.popleft()
        nonce, into = _NONCE.pack(self._number), into[:n_bytes]
        self._number += 1
        try:
            self._aead.decrypt_into(nonce, sealed, None, into)
        except InvalidTag as err:
            into[:] = bytes(n_bytes)
            raise LinkBroken("a block was altered on its way") from err
        return n_bytes

"""Text from tokens as they come."""

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer needs of a codec."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for control tokens."""
        ...


class Detokenizer:
    """Turns token ids into text without ever cutting a character.

    However the ids are dealt out to `push`, the texts joined are the one-shot decoding of all
    bytes: invalid ones become U+FFFD, an unfinished character waits for its rest.
    """

    def __init__(self, codec: TokenBytes) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is complete with these tokens."""
        return self._decoder.decode(b"".join(map(self._codec.token_bytes, token_ids)))

    def finish(self) -> str:
        """What an unfinished character leaves at the end: U+FFFD, or nothing."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

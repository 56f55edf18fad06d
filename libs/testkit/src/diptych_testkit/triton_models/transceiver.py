"""How KV gets from the context's process to the generation's: through files in one folder.

As with the real one, what nobody fetches stays until its time is over.
"""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from diptych_engine.port import KvBlock

ORPHAN_S = 20.0


class ContextParams(msgspec.Struct, frozen=True):
    """What `context_phase_params` holds here."""

    name: str
    first_token: int
    input_ids: tuple[int, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "ContextParams":
        return msgspec.msgpack.decode(data, type=cls)


class Sink:
    """Keeps the blocks of one context."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._buffers: dict[int, bytearray] = {}
        self.blocks: list[bytes] = []

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._buffers.setdefault(index, bytearray(self._slot_bytes)))

    def written(self, index: int, n_bytes: int) -> None:
        self.blocks.append(bytes(self._buffers.pop(index)[:n_bytes]))


class Transceiver:
    """One folder of KV."""

    def __init__(self, folder: Path, *, block_tokens: int) -> None:
        self._folder = folder
        self._block_tokens = block_tokens
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, blocks: Sequence[bytes]) -> str:
        """Keep the blocks of a context; gives their name."""
        self._forget_orphans()
        name = uuid.uuid4().hex
        (self._folder / f"{name}.new").write_bytes(msgspec.msgpack.encode(list(blocks)))
        (self._folder / f"{name}.new").rename(self._folder / name)
        return name

    def fetch(self, params: ContextParams) -> list[KvBlock]:
        """Take the blocks of a context. Raises `KeyError` if they are gone."""
        path = self._folder / params.name
        try:
            stored = msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])
            path.unlink()
        except FileNotFoundError:
            raise KeyError(f"no KV of context {params.name}") from None
        size, end = self._block_tokens, len(params.input_ids)
        return [
            KvBlock(index * size, min((index + 1) * size, end), memoryview(data))
            for index, data in enumerate(stored)
        ]

    def _forget_orphans(self) -> None:
        for path in self._folder.iterdir():
            try:
                if time.time() - path.stat().st_mtime > ORPHAN_S:
                    path.unlink()
            except FileNotFoundError:
                continue

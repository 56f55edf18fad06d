"""An encoded block: a head, then parts that are each compressed. Little endian.

    4 s  mark "DKVB"        1 B version (1)   1 B codec (its place in `CODECS`)   2 B tensors
    4 B  rows of a tensor   4 B numbers of a row    4 B bytes of the block when decoded
    4 B  bytes of each of three parts
    the parts: what lies between the tensors (led by their offsets), steps and anchors, symbols

Every length a part has when decoded follows from the head, and all of them together from the size
of the decoded block, which its reader knows beforehand: so a head that lies is noticed before
anything is made of it.
"""

import struct
from dataclasses import dataclass

from diptych_contracts.codecs import CODECS
from diptych_contracts.errors import Unverified
from diptych_kvlink.codecs.entropy import BAD_CODE

_MARK, _VERSION = b"DKVB", 1
_HEAD = struct.Struct("<4sBBHIIIIII")
HEAD_BYTES = _HEAD.size


@dataclass(frozen=True, slots=True)
class Frame:
    """One encoded block."""

    codec: str
    tensors: int
    rows: int
    dim: int
    block_bytes: int
    parts: tuple[bytes | memoryview, bytes | memoryview, bytes | memoryview]

    def pack(self) -> bytes:
        """Its bytes."""
        head = _HEAD.pack(
            _MARK,
            _VERSION,
            CODECS.index(self.codec),
            self.tensors,
            self.rows,
            self.dim,
            self.block_bytes,
            *map(len, self.parts),
        )
        return b"".join((head, *self.parts))

    @classmethod
    def unpack(cls, data: memoryview) -> "Frame":
        """What `pack` has made. Raises `Unverified`."""
        if data.nbytes < HEAD_BYTES:
            raise bad(f"{data.nbytes} bytes are no encoded block")
        mark, version, codec, tensors, rows, dim, block_bytes, *sizes = _HEAD.unpack_from(data)
        if (mark, version) != (_MARK, _VERSION) or codec >= len(CODECS):
            raise bad(f"not an encoded block of version {_VERSION}: {bytes(data[:6]).hex()}")
        if HEAD_BYTES + sum(sizes) != data.nbytes:
            raise bad(f"parts of {sizes} bytes in an encoded block of {data.nbytes}")
        parts, at = [], HEAD_BYTES
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        return cls(CODECS[codec], tensors, rows, dim, block_bytes, (parts[0], parts[1], parts[2]))


def bad(what: str) -> Unverified:
    """The error of a block that none of ours has encoded."""
    return Unverified(what, reason=BAD_CODE)

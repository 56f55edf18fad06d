"""What the two ends of a `nixl` link tell each other beside the blocks. Little-endian; pure.

    reader → writer   ask      mark, nonce, count, length of an address; the address; slots
    writer → reader   stopped  mark, nonce, count; slots

An ask closes the slots it names, each up to its generation: the writer begins no write into them
any more, and answers with those that no write of its own is on its way to. An ask for none is a
sign of life. The nonce is told to that writer only, so nobody else can answer for it.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from diptych_contracts.transfers import SlotRef

NONCE_BYTES = 8
MOST_SLOTS = 512
"""In one note: 6 KB."""
_ASK, _STOPPED = b"DKV?", b"DKV!"
_HEAD = struct.Struct("<4s8sHI")
_ENTRY = struct.Struct("<IQ")
_MOST_ADDRESS_BYTES = 140_000


@dataclass(frozen=True, slots=True)
class Ask:
    """Write no more into `refs`, and say so."""

    nonce: bytes
    refs: tuple[SlotRef, ...]
    address: str

    def pack(self) -> bytes:
        """As bytes."""
        address = self.address.encode()
        head = _HEAD.pack(_ASK, self.nonce, len(self.refs), len(address))
        return head + address + _packed(self.refs)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing more comes into `refs`."""

    nonce: bytes
    refs: tuple[SlotRef, ...]

    def pack(self) -> bytes:
        """As bytes."""
        return _HEAD.pack(_STOPPED, self.nonce, len(self.refs), 0) + _packed(self.refs)


def unpack(data: bytes) -> Ask | Stopped | None:
    """What a note says; None for what is none."""
    if len(data) < _HEAD.size:
        return None
    mark, nonce, count, address_bytes = _HEAD.unpack_from(data)
    expected = _HEAD.size + address_bytes + count * _ENTRY.size
    if count > MOST_SLOTS or address_bytes > _MOST_ADDRESS_BYTES or len(data) != expected:
        return None
    at = _HEAD.size + address_bytes
    refs = tuple(SlotRef(slot=slot, generation=g) for slot, g in _ENTRY.iter_unpack(data[at:]))
    if mark == _STOPPED and not address_bytes:
        return Stopped(nonce, refs)
    if mark == _ASK:
        try:
            return Ask(nonce, refs, data[_HEAD.size : at].decode("ascii"))
        except UnicodeDecodeError:
            return None
    return None


def _packed(refs: Sequence[SlotRef]) -> bytes:
    return b"".join(_ENTRY.pack(ref.slot, ref.generation) for ref in refs)

"""What becomes of a block on its way: encoded, then sealed; and back, in the other order.

Both take milliseconds, so neither is done on an engine's thread or an event loop.
"""

from dataclasses import dataclass, field

from diptych_contracts.cards import KvLayout
from diptych_contracts.codecs import RAW
from diptych_contracts.errors import Unverified
from diptych_contracts.ids import TransferId
from diptych_contracts.jobs import BlockDigest
from diptych_contracts.transfers import Ticket
from diptych_kvlink.block_seal import bound_to, opened, seal_in_place
from diptych_kvlink.codecs import decode_block, encode_block
from diptych_kvlink.verifying import checksum


@dataclass(frozen=True, slots=True)
class Packing:
    """How one transfer's blocks travel."""

    transfer_id: TransferId
    layout: KvLayout
    codec: str = RAW
    sealing_key: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, ticket: Ticket) -> "Packing":
        """As a ticket says."""
        return cls(ticket.transfer_id, ticket.layout, ticket.codec, ticket.sealing_key)

    @property
    def is_plain(self) -> bool:
        """Whether blocks travel as they are."""
        return self.codec == RAW and not self.sealing_key

    def pack(self, index: int, block: memoryview) -> "Packed":
        """Encode and seal `block` in the memory it lies in; as long as it is at most."""
        raw_bytes = 0
        encoded = encode_block(self.codec, self.layout, block) if self.codec != RAW else None
        if encoded is not None:
            raw_bytes = len(block)
            block = block[: len(encoded)]
            block[:] = encoded
        seal = b""
        if self.sealing_key:
            bound = bound_to(index, len(block), raw_bytes)
            seal = seal_in_place(self.sealing_key, self.transfer_id, block, bound)
        return Packed(index, block, raw_bytes, seal)

    def unpack(self, block: memoryview, digest: BlockDigest) -> memoryview:
        """The block behind verified bytes: those of `block`, or memory of its own.

        Raises:
            Unverified: it was sealed with another key, or encoded by no encoder of ours.
        """
        data = block
        if self.sealing_key:
            data = memoryview(opened(self.sealing_key, self.transfer_id, block, digest))
        if not digest.raw_bytes:
            return data
        try:
            return memoryview(decode_block(self.codec, data, digest.raw_bytes)).toreadonly()
        except Unverified as err:
            text = f"{self.transfer_id}: block {digest.index}: {err}"
            raise Unverified(text, reason=err.reason) from err


@dataclass(frozen=True, slots=True)
class Packed:
    """A block ready to be sent."""

    index: int
    data: memoryview
    raw_bytes: int
    seal: bytes

    def digest(self, salt: int) -> BlockDigest:
        """Of the bytes that travel."""
        return BlockDigest(
            index=self.index,
            n_bytes=len(self.data),
            checksum=checksum(self.data, salt),
            raw_bytes=self.raw_bytes,
            seal=self.seal,
        )

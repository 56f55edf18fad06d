"""What the `tcp` link says, byte by byte. Little-endian; pure.

    writer → reader   hello    magic and version, slot size, lengths of two names, key; the names:
                               who writes, and which reader it means
    reader → writer   welcome  magic and version, a verdict; any but WELCOME is the end
    writer → reader   batch    mark, number, count, length of a ticket's seal; the seal; for each
                               block slot, generation, bytes; then the blocks themselves
    reader → writer   ack      mark, number, count; for each block a byte: stored, or why not

An ack answers one batch, when its last byte lies in its slot. Whatever does not parse, or names a
slot or size that cannot be, is `Garbled`: the connection is cut. All of it goes through TLS 1.3,
unless that was turned off (`links`); but the blocks cross sealed with a key that the writer tells,
through TLS, once it is welcome (`tcp_sealing`).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from diptych_contracts.errors import Incompatible
from diptych_contracts.ids import Incarnation
from diptych_contracts.tickets import TicketFault
from diptych_contracts.transfers import SlotRef

MAGIC, ANSWER_MAGIC = b"DPTYKVL", b"DPTYKVR"
"""Two, so that a connection that met itself is not taken for a welcome."""
VERSION = 3
KEY_BYTES = 16
MAX_BLOCKS = 256
"""Blocks in one batch."""
MAX_SEAL_BYTES = 4096
"""They have some 300."""
_MAX_NAME_BYTES = 128

HELLO = struct.Struct("<7sBIHH16s")
WELCOME = struct.Struct("<7sBB")
BATCH = struct.Struct("<4sIHH")
ENTRY = struct.Struct("<IQI")
ACK = struct.Struct("<4sIH")
_BATCH_MARK, _ACK_MARK = b"BLKS", b"ACKS"


class Garbled(Exception):
    """The peer does not speak this protocol."""


class Verdict(IntEnum):
    """The reader's answer to a hello."""

    WELCOME = 0
    OTHER_VERSION = 1
    OTHER_READER = 2
    WRONG_KEY = 3
    OTHER_SLOT_SIZE = 4
    TOO_MANY = 5
    OTHER_CERTIFICATE = 6
    """It names a writer that was announced with another one."""


class Stored(IntEnum):
    """What became of one block."""

    STORED = 0
    CLOSED = 1
    """Its slot is not open under this generation."""
    NO_TICKET = 2
    ALTERED_TICKET = 3
    EXPIRED_TICKET = 4
    OTHER_WRITER = 5
    """The slot, or the ticket, is another writer's."""
    OTHER_TRANSFER = 6
    """The slot is another transfer's than the ticket's."""


FAULTS = {
    Stored.CLOSED: TicketFault.USED,
    Stored.NO_TICKET: TicketFault.MISSING,
    Stored.ALTERED_TICKET: TicketFault.ALTERED,
    Stored.EXPIRED_TICKET: TicketFault.EXPIRED,
    Stored.OTHER_WRITER: TicketFault.WRITER,
    Stored.OTHER_TRANSFER: TicketFault.REQUEST,
}
"""What is wrong with the ticket of a block that was not stored."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls whom."""

    writer: Incarnation
    reader: str
    slot_bytes: int
    key: bytes
    version: int = VERSION

    def pack(self) -> bytes:
        """As bytes."""
        writer, reader = self.writer.encode(), self.reader.encode()
        head = HELLO.pack(MAGIC, self.version, self.slot_bytes, len(writer), len(reader), self.key)
        return head + writer + reader


def hello_names_bytes(head: bytes) -> int:
    """How many bytes of names follow a hello's head. Raises `Garbled`."""
    magic, _, _, writer_bytes, reader_bytes, _ = HELLO.unpack(head)
    if magic != MAGIC:
        raise Garbled(f"expected the greeting of a KV writer, got {bytes(head[:8])!r}")
    if not (0 < writer_bytes <= _MAX_NAME_BYTES and reader_bytes <= _MAX_NAME_BYTES):
        raise Garbled(f"names of {writer_bytes} and {reader_bytes} bytes")
    return int(writer_bytes + reader_bytes)


def unpack_hello(head: bytes, names: bytes) -> Hello:
    """The hello. Raises `Garbled`."""
    _, version, slot_bytes, writer_bytes, _, key = HELLO.unpack(head)
    try:
        writer, reader = names[:writer_bytes].decode("ascii"), names[writer_bytes:].decode("ascii")
    except UnicodeDecodeError as err:
        raise Garbled("names that are no text") from err
    if not names.decode("ascii").isprintable():
        raise Garbled("names that cannot be printed")
    return Hello(Incarnation(writer), reader, slot_bytes, key, version)


def pack_welcome(verdict: Verdict) -> bytes:
    """The answer to a hello."""
    return WELCOME.pack(ANSWER_MAGIC, VERSION, verdict)


def check_welcome(data: bytes, where: str) -> None:
    """Raise unless the reader lets this writer in.

    Raises:
        Garbled: what answered is no KV reader.
        Incompatible: it says no.
    """
    magic, version, verdict = WELCOME.unpack(data)
    if magic != ANSWER_MAGIC or verdict not in tuple(Verdict):
        raise Garbled(f"{where} answered {data!r}")
    if verdict != Verdict.WELCOME:
        why = Verdict(verdict).name.lower().replace("_", " ")
        raise Incompatible(f"{where} (version {version}) turned this writer away: {why}")


def pack_batch(number: int, blocks: Sequence[tuple[SlotRef, int]], seal: bytes = b"") -> bytes:
    """The head of a batch, written under the ticket of `seal`: its blocks follow."""
    head = BATCH.pack(_BATCH_MARK, number, len(blocks), len(seal))
    numbers = [part for ref, n_bytes in blocks for part in (ref.slot, ref.generation, n_bytes)]
    return head + seal + struct.pack("<" + "IQI" * len(blocks), *numbers)


def unpack_batch(head: bytes) -> tuple[int, int, int]:
    """A batch's number, its count of blocks and its seal's length. Raises `Garbled`."""
    mark, number, count, seal_bytes = BATCH.unpack(head)
    if mark != _BATCH_MARK or not 0 < count <= MAX_BLOCKS or seal_bytes > MAX_SEAL_BYTES:
        raise Garbled(f"expected a batch of 1 to {MAX_BLOCKS} blocks, got {bytes(head)!r}")
    return number, count, seal_bytes


def unpack_entries(data: bytes, *, slots: int, slot_bytes: int) -> list[tuple[SlotRef, int]]:
    """Where each block of a batch goes, and its size. Raises `Garbled`."""
    entries = []
    for slot, generation, n_bytes in ENTRY.iter_unpack(data):
        if slot >= slots or not 0 < n_bytes <= slot_bytes:
            raise Garbled(
                f"a block of {n_bytes} bytes for slot {slot}; there are {slots} of {slot_bytes}"
            )
        entries.append((SlotRef(slot=slot, generation=generation), n_bytes))
    return entries


def pack_ack(number: int, stored: Sequence[Stored]) -> bytes:
    """The answer to a batch."""
    return ACK.pack(_ACK_MARK, number, len(stored)) + bytes(stored)


def unpack_ack(head: bytes) -> tuple[int, int]:
    """Which batch an ack answers, and how many blocks that had. Raises `Garbled`."""
    mark, number, count = ACK.unpack(head)
    if mark != _ACK_MARK or not 0 < count <= MAX_BLOCKS:
        raise Garbled(f"expected an ack, got {bytes(head)!r}")
    return number, count

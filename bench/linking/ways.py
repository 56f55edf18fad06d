"""The ways `bench/kvlink.py` moves the same blocks into another process, or beside themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_contracts.wire import decode
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.links import LinkSettings, open_link
from diptych_kvlink.nixl_writer import NixlWriting
from diptych_kvlink.pool_file import PoolShape, private_slots
from diptych_kvlink.verifying import checksum
from linking.child import Child
from linking.plain import called, mapped, ordinary
from linking.reader import SALT, STALL_S, WRITER

BATCH_BLOCKS, BATCH_BYTES = 256, 1 << 24
"""As `kvlink.outgoing` sends."""


@dataclass(frozen=True)
class Way:
    """`move(window, checked)` moves all blocks of a window once.

    `verify` is what the reader then hashes.
    """

    move: Callable[[int, bool], None]
    verify: str = ""


@dataclass(frozen=True)
class Room:
    """Blocks of `size` bytes, moved `count` at a time: one window after another of so many."""

    size: int
    count: int
    windows: int

    @property
    def shape(self) -> PoolShape:
        """Of every pool."""
        return PoolShape(slots=self.count * self.windows, slot_bytes=self.size)

    def windowed(self, all_of_them: Sequence) -> list:
        """Cut into windows."""
        return [all_of_them[at : at + self.count] for at in range(0, self.shape.slots, self.count)]


@dataclass(frozen=True)
class Writer:
    """Who writes."""

    settings: LinkSettings
    identity: LinkIdentity
    writing: NixlWriting | None


class Ways:
    """All of them, over the same blocks."""

    def __init__(self, reader: Child, room: Room, writer: Writer) -> None:
        self._reader, self._room = reader, room
        self._blocks = ordinary(room.shape)
        for number, block in enumerate(self._blocks):
            block[:] = bytes([number % 251 + 1]) * room.size
        self._refs = [SlotRef(slot=slot, generation=1) for slot in range(room.shape.slots)]
        self._closing: list[Callable[[], None]] = []
        self.ways = {
            "memcpy": Way(self._copying(ordinary(room.shape))),
            "memcpy 2M": Way(self._copying(private_slots(room.shape))),
            "shared mem": self._plain_memory(),
            "socket": self._plain_socket(),
        }
        for name, (endpoint, seal) in reader.told["links"].items():
            link = self._linked(name, decode(bytes.fromhex(endpoint), LinkEndpoint), writer)
            over = self._over_shm(link) if name == "shm" else self._over(link, bytes.fromhex(seal))
            self.ways[name] = Way(over, "links")

    def close(self) -> None:
        """Close every link."""
        for close in self._closing:
            close()

    def _linked(self, name: str, endpoint: LinkEndpoint, writer: Writer):
        settings = writer.settings
        if name == "tcp":
            settings = LinkSettings(
                kinds=settings.kinds, directory=settings.directory, stall_s=STALL_S, tls=False
            )
        link = open_link(
            endpoint,
            writer=WRITER,
            settings=settings,
            identity=writer.identity,
            writing=writer.writing,
        )
        link.connect()
        self._closing.append(link.close)
        return link

    def _plain_memory(self) -> Way:
        copy = self._copying(mapped(self._reader.told["plain"], self._room.shape))

        def move(window: int, checked: bool) -> None:
            copy(window, checked)
            self._reader.ask("ready")

        return Way(move, "plain")

    def _copying(self, slots: list[memoryview]) -> Callable[[int, bool], None]:
        windows = self._room.windowed(list(zip(slots, self._blocks, strict=True)))

        def move(window: int, checked: bool) -> None:
            if checked:
                for slot, block in windows[window]:
                    slot[:] = block
                    checksum(slot, SALT)
            else:
                for slot, block in windows[window]:
                    slot[:] = block

        return move

    def _plain_socket(self) -> Way:
        sock = called(self._reader.told["port"])
        self._closing.append(sock.close)
        windows = self._room.windowed(self._blocks)

        def move(window: int, checked: bool) -> None:
            sock.sendall(bytes([window]))
            for block in windows[window]:
                sock.sendall(block)
            if checked:
                _hash(windows[window])
            sock.recv(1)

        return Way(move, "socket")

    def _over_shm(self, link) -> Callable[[int, bool], None]:
        """The engine exports straight into the slots; each block is hashed when it is final."""
        buffers = [link.buffer(ref) for ref in self._refs]
        copy = self._copying(buffers)
        windows = self._room.windowed(list(zip(self._refs, buffers, strict=True)))

        def move(window: int, checked: bool) -> None:
            copy(window, checked)
            link.send(windows[window])
            link.confirm()

        return move

    def _over(self, link, seal: bytes) -> Callable[[int, bool], None]:
        """From the link's own buffers: what the engine exports into is what is sent."""
        buffers = [link.buffer(ref) for ref in self._refs]
        for buffer, block in zip(buffers, self._blocks, strict=True):
            buffer[:] = block
        pairs = [
            (ref, buffer.toreadonly()) for ref, buffer in zip(self._refs, buffers, strict=True)
        ]
        step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // self._room.size))
        windows = [
            [window[at : at + step] for at in range(0, len(window), step)]
            for window in self._room.windowed(pairs)
        ]

        def move(window: int, checked: bool) -> None:
            for batch in windows[window]:
                link.send(batch, seal)
                if checked:
                    _hash([data for _, data in batch])
                link.confirm()

        return move


def _hash(blocks: Sequence[memoryview]) -> None:
    for block in blocks:
        checksum(block, SALT)

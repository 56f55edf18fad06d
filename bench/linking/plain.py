"""What links are made of, without them: memory another process maps, and a plain socket."""

import mmap
import os
import socket
import threading
from pathlib import Path

from diptych_kvlink.pool_file import PoolShape


def ordinary(shape: PoolShape) -> list[memoryview]:
    """Private slots on pages as programs get them (4 KiB), each touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    whole = memoryview(mmap.mmap(-1, shape.slots * shape.stride_bytes, flags=flags))
    starts = range(0, len(whole), shape.stride_bytes)
    return [whole[at : at + shape.slot_bytes] for at in starts]


def shared_memory(folder: str, shape: PoolShape) -> tuple[str, list[memoryview]]:
    """A new file of slots, touched, and its path."""
    path = Path(folder, "plain")
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, shape.total_bytes)
    return str(path), mapped(str(path), shape)


def mapped(path: str, shape: PoolShape) -> list[memoryview]:
    """The slots of that file, each page touched."""
    with open(path, "r+b") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        whole = memoryview(mmap.mmap(file.fileno(), shape.total_bytes, flags=flags))
    starts = range(0, shape.slots * shape.stride_bytes, shape.stride_bytes)
    return [whole[at : at + shape.slot_bytes] for at in starts]


def listener(shape: PoolShape, count: int) -> tuple[int, list[memoryview]]:
    """A port that takes `count` blocks into private slots, and says `k` after each round.

    A round begins with a byte: the number of the window of slots that it goes into.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    slots = ordinary(shape)

    def serve() -> None:
        sock = listening.accept()[0]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while window := sock.recv(1):
            start = window[0] * count
            for slot in slots[start : start + count]:
                at = 0
                while at < len(slot):
                    got = sock.recv_into(slot[at:])
                    if not got:
                        return
                    at += got
            sock.sendall(b"k")

    threading.Thread(target=serve, daemon=True).start()
    return listening.getsockname()[1], slots


def called(port: int) -> socket.socket:
    """A connection to that port."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock

"""The memory that `nixl` writers send from: registered once, for the process's life.

A source is in use until its block has arrived, or never can: NIXL reads it when it sends, be that
after the request it belonged to has long been given up. Sent then with what the next request had
put there, it would bring one user's KV to another (seen: 40 of 48 blocks).
"""

import ctypes
import mmap
import threading
from dataclasses import dataclass

from diptych_kvlink.huge_pages import private
from diptych_kvlink.nixl_plane import Plane

_FOR_LIFE: list[memoryview] = []
"""Memory that peers know of: it is never unmapped, whoever closes what."""
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Room for one block."""

    memory: memoryview
    address: int
    registered_at: int
    """Where the registered memory that it is part of begins."""


class Sources:
    """Rooms of each size, for all links of a process. Safe to use from several threads."""

    def __init__(self, plane: Plane, *, most_bytes: int = MOST_BYTES) -> None:
        self._plane = plane
        self._lock = threading.Lock()
        self._free: dict[int, list[Source]] = {}
        self._made: dict[int, int] = {}
        self._left_bytes = most_bytes

    def provide(self, slot_bytes: int, count: int) -> None:
        """Make sure of `count` rooms free, as far as the most allows. May block."""
        stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            lacking = count - len(self._free.get(slot_bytes, ()))
            lacking = min(lacking, self._left_bytes // stride)
            if lacking <= 0:
                return
            self._left_bytes -= lacking * stride
        memory, address = lasting(lacking * stride)
        self._plane.register(address, lacking * stride)
        made = [
            Source(memory[at : at + slot_bytes], address + at, address)
            for at in reversed(range(0, lacking * stride, stride))  # The last is taken first.
        ]
        with self._lock:
            self._free.setdefault(slot_bytes, []).extend(made)

    def take(self, slot_bytes: int) -> Source | None:
        """A free room, if there is one."""
        with self._lock:
            free = self._free.get(slot_bytes)
            return free.pop() if free else None

    def give_back(self, source: Source) -> None:
        """Nobody reads or writes it any more."""
        with self._lock:
            self._free.setdefault(len(source.memory), []).append(source)


def lasting(n_bytes: int) -> tuple[memoryview, int]:
    """Fresh memory that stays mapped as long as the process lives, and its address."""
    memory = memoryview(private(n_bytes))[:n_bytes]
    _FOR_LIFE.append(memory)
    return memory, address_of(memory)


def keep_for_life(memory: memoryview) -> None:
    """Peers know of `memory`: it must stay mapped."""
    _FOR_LIFE.append(memory)


def address_of(memory: memoryview) -> int:
    """Where writable memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))

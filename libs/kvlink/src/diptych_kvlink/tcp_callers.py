"""Who is connected to a `tcp` reader: strangers, writers, and those that are gone.

A stranger is a connection that has not said who it is. There may be few of them, and each has one
deadline for everything it must say; the newest pushes the oldest out, so that connections that say
nothing cannot keep a writer from getting in.
"""

import threading
from collections import OrderedDict

from diptych_contracts.ids import Incarnation
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.tcp_wire import Verdict

MOST_WRITERS = 256
MOST_STRANGERS = 16
_REMEMBERED = 1024


class Callers:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._strangers: OrderedDict[TcpStream, None] = OrderedDict()
        self._writers: dict[Incarnation, TcpStream] = {}
        self._lost: OrderedDict[Incarnation, None] = OrderedDict()
        self._closing = False

    def expect(self, writer: Incarnation) -> None:
        """A new ticket for `writer`: what it lost before does not count."""
        with self._lock:
            self._lost.pop(writer, None)

    def is_lost(self, writer: Incarnation) -> bool:
        """Whether `writer` was connected and is no more."""
        return writer in self._lost

    def arrived(self, stream: TcpStream) -> bool:
        """A stranger is there; gives False if another was cut off for it."""
        with self._lock:
            self._strangers[stream] = None
            if self._closing:
                stream.hang_up()
            crowded = len(self._strangers) > MOST_STRANGERS
            if crowded:
                self._strangers.popitem(last=False)[0].hang_up()
            return not crowded

    def let_in(self, writer: Incarnation, stream: TcpStream) -> Verdict:
        """A stranger is `writer`. A writer has one connection: its newest."""
        with self._lock:
            self._strangers.pop(stream, None)
            if len(self._writers) >= MOST_WRITERS and writer not in self._writers:
                return Verdict.TOO_MANY
            older = self._writers.get(writer)
            if older is not None:
                older.hang_up()
            self._writers[writer] = stream
            self._lost.pop(writer, None)
            return Verdict.WELCOME

    def left(self, stream: TcpStream) -> None:
        """A connection has ended."""
        with self._lock:
            self._strangers.pop(stream, None)
            for writer, current in tuple(self._writers.items()):
                if current is stream:
                    del self._writers[writer]
                    self._lost[writer] = None
            while len(self._lost) > _REMEMBERED:
                self._lost.popitem(last=False)

    def hang_up(self) -> None:
        """End every connection, and each that still comes."""
        with self._lock:
            self._closing = True
            for stream in (*self._strangers, *self._writers.values()):
                stream.hang_up()

"""The `tcp` link, reader's side: a listener, and a thread per writer.

**When slots are free.** Only the reader's own threads write its memory, and only through
`slot_gates`: once a slot is closed no late byte can reach it, wherever it still is (in the writer,
in the network, in a socket's buffer). So nothing needs quarantine here, unlike with shared memory.
And when a writer's connection has ended, nothing more can come from it: its tickets end with it.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from diptych_contracts.errors import LinkBroken, Permanent
from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink.slot_gates import SlotGates
from diptych_kvlink.tcp_address import TcpAddress, announced_host, is_loopback
from diptych_kvlink.tcp_receiving import Identity, Receiving
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.tcp_wire import KEY_BYTES, Garbled, Verdict

KIND = "tcp"
log = logging.getLogger("diptych.kvlink")

_BACKLOG = 16
_MOST_WRITERS = 256
_MOST_STRANGERS = 16
"""Connections that have not said who they are."""
_JOIN_S = 2.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Listening:
    """Where to listen, and how patient to be."""

    host: str
    port: int
    stall_s: float
    host_id: str
    """The machine, for an endpoint that is reachable from nowhere else."""


class TcpTarget:
    """The reader's slots behind a TCP listener.

    Args:
        name: The reader's incarnation.
        slots: The memory to receive into; it outlives this object only if others hold it.
        slot_bytes: Length of each.
        listening: Where.

    Raises:
        Permanent: it cannot listen there.
    """

    def __init__(
        self, name: str, slots: Sequence[memoryview], *, slot_bytes: int, listening: Listening
    ) -> None:
        self._stall_s = listening.stall_s
        self._gates = SlotGates(slots)
        self._identity = Identity(name, slot_bytes, secrets.token_bytes(KEY_BYTES))
        self._lock = threading.Lock()
        self._strangers: set[TcpStream] = set()
        self._writers: dict[Incarnation, TcpStream] = {}
        self._lost: set[Incarnation] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = False
        host = announced_host(listening.host)
        self._listener = _listen(listening.host, listening.port)
        port = self._listener.getsockname()[1]
        address = TcpAddress(host, port, name, self._identity.key)
        self._endpoint = LinkEndpoint(
            kind=KIND,
            host=listening.host_id if is_loopback(address.host) else "",
            address=str(address),
            slots=len(slots),
            slot_bytes=slot_bytes,
        )
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._accepting.start()

    @property
    def endpoint(self) -> LinkEndpoint:
        """Where writers find the slots."""
        return self._endpoint

    @property
    def stops_writers(self) -> bool:
        """Always: see the module."""
        return True

    def admit(self, slot: int, generation: int, writer: Incarnation | None = None) -> None:
        """From now on let in only `writer`, under `generation`; 0 lets nobody in."""
        self._gates.set(slot, generation, writer)

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot, read-only."""
        return self._gates.view(slot, n_bytes)

    def is_idle(self, ref: SlotRef) -> bool:
        """Always, once the slot is closed."""
        return True

    def expect(self, writer: Incarnation) -> None:
        """A new ticket for `writer`: what it lost before does not count."""
        with self._lock:
            self._lost.discard(writer)

    def is_dead(self, writer: Incarnation) -> bool:
        """Whether `writer` was connected and is no more."""
        return writer in self._lost

    def close(self) -> None:
        """Stop listening, end every connection, let the memory go. Idempotent."""
        with self._lock:
            self._closing = True
            streams = [*self._strangers, *self._writers.values()]
            threads = [self._accepting, *self._threads]
        _stop_listening(self._listener)
        for stream in streams:
            stream.hang_up()
        for thread in threads:
            thread.join(_JOIN_S)
        self._listener.close()
        self._gates.drop()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listener.accept()
            except OSError as err:
                if not self._closing:  # Out of descriptors, say: the next one may do.
                    log.warning("kv link: cannot accept a connection: %s", err)
                    time.sleep(_PAUSE_S)
                continue
            self._begin(sock, f"{address[0]}:{address[1]}")

    def _begin(self, sock: socket.socket, peer: str) -> None:
        try:
            stream = TcpStream(sock, stall_s=self._stall_s)
        except OSError:  # It has left already.
            sock.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(stream, peer), name="kv-receive", daemon=True
        )
        with self._lock:
            welcome = not self._closing and len(self._strangers) < _MOST_STRANGERS
            if welcome:
                self._strangers.add(stream)
                self._threads.add(thread)
                thread.start()
        if not welcome:
            log.warning("kv link: too many unknown connections; %s is cut off", peer)
            stream.close()

    def _serve(self, stream: TcpStream, peer: str) -> None:
        who = peer

        def greeted(writer: Incarnation) -> Verdict:
            nonlocal who
            who = f"{writer} at {peer}"
            return self._let_in(writer, stream)

        try:
            Receiving(stream, self._gates, self._identity, greeted=greeted).run()
            log.info("kv link: %s has left", who)
        except Garbled as err:
            log.warning("kv link: %s is cut off: %s", who, err)
        except LinkBroken as err:
            if not self._closing:
                log.warning("kv link: %s is cut off: %s", who, err)
        finally:
            self._forget(stream)
            stream.close()

    def _let_in(self, writer: Incarnation, stream: TcpStream) -> Verdict:
        """A writer has one connection: its newest."""
        with self._lock:
            self._strangers.discard(stream)
            if len(self._writers) >= _MOST_WRITERS and writer not in self._writers:
                return Verdict.TOO_MANY
            older = self._writers.get(writer)
            if older is not None:
                older.hang_up()
            self._writers[writer] = stream
            self._lost.discard(writer)
            return Verdict.WELCOME

    def _forget(self, stream: TcpStream) -> None:
        with self._lock:
            self._strangers.discard(stream)
            self._threads.discard(threading.current_thread())
            for writer, current in tuple(self._writers.items()):
                if current is stream:
                    del self._writers[writer]
                    self._lost.add(writer)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as err:
        raise Permanent(f"cannot listen on {host}:{port} for KV: {err.strerror}") from err
    return listener


def _stop_listening(listener: socket.socket) -> None:
    """Wake the thread in `accept`."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:  # Not on Linux: a last connection wakes it.
        try:
            socket.create_connection(listener.getsockname()[:2], timeout=1).close()
        except OSError:
            return

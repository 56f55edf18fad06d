"""The `tcp` link, reader's side: a listener, and a thread per writer.

**Who is let in.** Through TLS, only who shows the certificate that its `Reserve` announced, and as
that writer only. What it then writes, it writes under a ticket (`sealing`), into slots that are
open to it for that very transfer.

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

from diptych_contracts.errors import LinkBroken
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.pinning import Pins
from diptych_kvlink.presence import Witness
from diptych_kvlink.slot_gates import Holder, SlotGates
from diptych_kvlink.tallying import TurnedAway
from diptych_kvlink.tcp_address import TcpAddress, announced_host, is_loopback
from diptych_kvlink.tcp_callers import Callers
from diptych_kvlink.tcp_listening import Listening, listen, stop_listening
from diptych_kvlink.tcp_receiving import Guard, Identity, Receiving, TurnedDown
from diptych_kvlink.tcp_stream import TcpStream
from diptych_kvlink.tcp_wire import KEY_BYTES, Garbled, Verdict
from diptych_kvlink.tls_stream import TlsStream, Untrusted

KIND = "tcp"
log = logging.getLogger("diptych.kvlink")

_JOIN_S = 2.0
_PAUSE_S = 0.1
_MOST_THREADS = 512
"""Connections of any sort: all that may be let in, and as many that are leaving."""
_TURNED_DOWN = {
    Verdict.TOO_MANY: TurnedAway.CROWDED,
    Verdict.OTHER_CERTIFICATE: TurnedAway.OTHER_CERTIFICATE,
}


class TcpTarget:
    """The reader's slots behind a TCP listener.

    Args:
        name: The reader's incarnation.
        slots: The memory to receive into; it outlives this object only if others hold it.
        slot_bytes: Length of each.
        listening: Where, and whether with TLS.
        guard: Who checks tickets and counts what is refused.
        witness: Proves the death of a writer of this host that never called; None: nothing does.

    Raises:
        Permanent: it cannot, or must not, listen there.
    """

    def __init__(
        self,
        name: str,
        slots: Sequence[memoryview],
        *,
        slot_bytes: int,
        listening: Listening,
        guard: Guard,
        witness: Witness | None = None,
    ) -> None:
        self._stall_s = listening.stall_s
        self._witness = witness
        self._gates = SlotGates(slots)
        self._identity = Identity(name, slot_bytes, secrets.token_bytes(KEY_BYTES))
        self._guard = guard
        self._callers = Callers()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._closing = False
        own = LinkIdentity() if listening.tls else None
        self._pins = Pins(own) if own is not None else None
        host = announced_host(listening.host)
        self._listener = listen(listening)
        port = self._listener.getsockname()[1]
        address = TcpAddress(host, port, name, self._identity.key)
        self._endpoint = LinkEndpoint(
            kind=KIND,
            host=listening.host_id if is_loopback(address.host) else "",
            address=str(address),
            slots=len(slots),
            slot_bytes=slot_bytes,
            certificate=own.certificate if own is not None else b"",
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

    def admit(
        self,
        slot: int,
        generation: int,
        writer: Incarnation | None = None,
        transfer_id: TransferId | None = None,
    ) -> None:
        """From now on let in only `writer`, for that transfer; 0 lets nobody in."""
        holder = None
        if writer is not None and transfer_id is not None:
            holder = Holder(writer, transfer_id)
        self._gates.set(slot, generation, holder)

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot, read-only."""
        return self._gates.view(slot, n_bytes)

    def is_idle(self, ref: SlotRef) -> bool:
        """Always, once the slot is closed."""
        return True

    def expect(self, writer: Incarnation, certificate: bytes = b"", agent: bytes = b"") -> None:
        """A new ticket for `writer`, who will show `certificate`. Raises `Refused`."""
        if self._pins is not None:
            self._pins.pin(writer, certificate)
        self._callers.expect(writer)
        if self._witness is not None:
            self._witness.expect(writer)

    def is_dead(self, writer: Incarnation) -> bool:
        """Whether `writer` was connected and is no more, or its process has ended."""
        if self._callers.is_lost(writer):
            return True
        return self._witness is not None and self._witness.is_dead(writer)

    def close(self) -> None:
        """Stop listening, end every connection, let the memory go. Idempotent."""
        with self._lock:
            self._closing = True
            threads = [self._accepting, *self._threads]
        stop_listening(self._listener)
        self._callers.hang_up()
        for thread in threads:
            thread.join(_JOIN_S)
        self._listener.close()
        self._gates.drop()
        if self._witness is not None:
            self._witness.close()

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
        thread = threading.Thread(
            target=self._serve, args=(sock, peer), name="kv-receive", daemon=True
        )
        with self._lock:
            welcome = not self._closing and len(self._threads) < _MOST_THREADS
            if welcome:
                self._threads.add(thread)
                thread.start()
        if not welcome:
            self._crowded()
            sock.close()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            stream = self._stream(sock)
        except OSError:  # It has left already.
            sock.close()
        else:
            self._receive(stream, peer)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _receive(self, stream: TcpStream, peer: str) -> None:
        try:
            if not self._callers.arrived(stream):
                self._crowded()
            self._attend(stream, peer)
        finally:
            self._callers.left(stream)
            stream.close()

    def _stream(self, sock: socket.socket) -> TcpStream:
        if self._pins is None:
            return TcpStream(sock, stall_s=self._stall_s)
        return TlsStream(sock, self._pins.context(), calls=False, stall_s=self._stall_s)

    def _attend(self, stream: TcpStream, peer: str) -> None:
        """One connection until it ends; whatever it does harms nobody else."""
        who, certificate = peer, b""

        def greeted(writer: Incarnation) -> Verdict:
            nonlocal who
            if self._pins is not None and not self._pins.is_shown_by(writer, certificate):
                return Verdict.OTHER_CERTIFICATE
            who = f"{writer} at {peer}"
            return self._callers.let_in(writer, stream)

        try:
            until_s = stream.deadline_s(0)  # Of all that a stranger has to say.
            if isinstance(stream, TlsStream):
                certificate = stream.shake_hands(until_s)
            receiving = Receiving(stream, self._gates, self._identity, self._guard, greeted=greeted)
            receiving.run(until_s)
            log.info("kv link: %s has left", who)
        except Untrusted as err:
            self._cut_off(who, err.reason, err)
        except TurnedDown as err:
            self._cut_off(who, _TURNED_DOWN.get(err.verdict, TurnedAway.OTHER_PEER), err)
        except Garbled as err:
            self._cut_off(who, TurnedAway.GARBLED, err)
        except LinkBroken as err:
            if not self._closing:
                self._cut_off(who, TurnedAway.SILENT if who == peer else None, err)

    def _cut_off(self, who: str, reason: TurnedAway | None, err: Exception) -> None:
        if reason is not None:
            self._guard.tally.add(reason)
        log.warning("kv link: %s is cut off: %s", who, err)

    def _crowded(self) -> None:
        self._guard.tally.add(TurnedAway.CROWDED)
        log.warning("kv link: too many unknown connections; the oldest is cut off")

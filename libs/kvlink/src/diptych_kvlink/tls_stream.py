"""A TCP connection inside TLS 1.3, each end knowing the other's certificate.

As `tcp_stream`: the socket does not block, waiting is `poll` with a deadline. TLS itself never sees
the socket: it reads and writes memory, and what has to cross is sent and received here, in pieces
bigger than its records. So nothing waits inside of TLS, and its last words still go out.

Nobody says goodbye (`close_notify`): a message that was cut off is known by its length. So the end
of the connection is read off the socket, which another thread may look at too.
"""

import contextlib
import select
import socket
import ssl
from collections.abc import Sequence

from diptych_contracts.errors import Incompatible, LinkBroken
from diptych_kvlink.tallying import TurnedAway
from diptych_kvlink.tcp_stream import TcpStream, readable

_PIECE_BYTES = 1 << 16
_RECORD_BYTES = 1 << 14


class Untrusted(Incompatible):
    """The peer is not whom this side expects; `reason` is for counting."""

    def __init__(self, reason: TurnedAway, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TlsStream(TcpStream):
    """One end, not greeted yet: `shake_hands` first.

    Args:
        sock: Connected.
        context: `LinkIdentity.calling` or `answering`.
        calls: Whether this end called.
        stall_s: As of `TcpStream`.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, calls: bool, stall_s: float
    ) -> None:
        super().__init__(sock, stall_s=stall_s)
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=not calls)
        self._room = memoryview(bytearray(_PIECE_BYTES))
        self._unsent = memoryview(b"")
        self._sealed_bytes = 0

    def shake_hands(self, until_s: float) -> bytes:
        """Gives the certificate the peer has proved to be its own.

        Raises:
            Untrusted: it is none that was expected, or the peer does not speak TLS 1.3.
            LinkBroken: the peer has gone, or is too slow.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(until_s)
                if not self._fill():
                    self.wait_for_bytes(until_s)
            except ssl.SSLError as err:
                with contextlib.suppress(LinkBroken):  # Tell it, if it still listens.
                    self._flush(until_s)
                raise Untrusted(_reason(err), f"no TLS with this peer: {_what(err)}") from err
            else:
                self._flush(until_s)
                return self._tls.getpeercert(binary_form=True) or b""

    def receive_some(self, into: memoryview) -> int:
        """What is there already, at most all of `into`; 0: nothing yet.

        Raises:
            LinkBroken: the connection has ended.
            Untrusted: the peer does not trust this end.
        """
        at, most = 0, min(len(into), _PIECE_BYTES)
        while at < most:
            received = self._open(into[at:])
            if not received and (at or not self._fill()):
                break
            at += received
        return at

    def wait_idle(self) -> None:
        """Wait without a limit for the peer to begin."""
        if not (self._tls.pending() or self._arrived.pending):
            readable(self._sock)

    def _open(self, into: memoryview) -> int:
        """What of that which has arrived can be read; 0: nothing whole."""
        try:
            received = int(self._tls.read(len(into), into))
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as err:
            if "ALERT" in (err.reason or ""):
                detail = f"the peer ended TLS: {_what(err)}"
                raise Untrusted(TurnedAway.OTHER_CERTIFICATE, detail) from err
            raise LinkBroken(f"receiving failed: {_what(err)}") from err
        if not received:
            raise LinkBroken("the peer has closed the connection")
        return received

    def _fill(self) -> bool:
        """Take in what has come; whether that is anything. Raises `LinkBroken`."""
        received = super().receive_some(self._room)
        self._arrived.write(self._room[:received])
        return received > 0

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        """Counts a piece once all of it is on its way."""
        if not self._unsent:
            piece = _piece(buffers)
            try:
                self._sealed_bytes = self._tls.write(piece)
            except ssl.SSLError as err:
                raise LinkBroken(f"sending failed: {_what(err)}") from err
            self._unsent = memoryview(self._leaving.read())
        self._unsent = self._unsent[super()._send_some([self._unsent]) :]
        return 0 if self._unsent else self._sealed_bytes

    def _flush(self, until_s: float) -> None:
        left = memoryview(self._leaving.read())
        while left:
            sent = super()._send_some([left])
            if not sent:
                self._wait(select.POLLOUT, until_s, "takes nothing")
            left = left[sent:]


def _piece(buffers: Sequence[memoryview]) -> memoryview | bytes:
    """What to seal next: small buffers together, since each would be a record of its own."""
    if len(buffers[0]) >= _RECORD_BYTES:
        return buffers[0][:_PIECE_BYTES]
    joined = bytearray()
    for buffer in buffers:
        joined += buffer[: _RECORD_BYTES - len(joined)]
        if len(joined) == _RECORD_BYTES:
            break
    return bytes(joined)


def _reason(err: ssl.SSLError) -> TurnedAway:
    if isinstance(err, ssl.SSLCertVerificationError):
        return TurnedAway.OTHER_CERTIFICATE
    if err.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return TurnedAway.NO_CERTIFICATE
    if "ALERT" in (err.reason or ""):  # It is the peer who trusts nobody here.
        return TurnedAway.OTHER_CERTIFICATE
    return TurnedAway.NOT_TLS


def _what(err: ssl.SSLError) -> str:
    if isinstance(err, ssl.SSLCertVerificationError):
        return str(err.verify_message)
    return (err.reason or str(err)).lower().replace("_", " ")

"""A TCP connection inside TLS 1.3, each end knowing the other's certificate.

As `tcp_stream`: the socket does not block, waiting is `poll` with a deadline. TLS itself never sees
the socket: it reads and writes memory, and what has to cross is sent and received here. So nothing
waits inside of TLS, and its last words still go out. TLS is given one record after another and not
what comes behind: after a batch's message those are sealed blocks (`tcp_sealing`).

Nobody says goodbye (`close_notify`): a message that was cut off is known by its length. So the end
of the connection is read off the socket, which another thread may look at too.
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence

from diptych_contracts.errors import Incompatible, LinkBroken
from diptych_kvlink.tallying import TurnedAway
from diptych_kvlink.tcp_sealing import KEY_BYTES, PIECE_BYTES, TAG_BYTES, Opening, Sealing, new_key
from diptych_kvlink.tcp_stream import TcpStream

_ROOM_BYTES = 4 * (PIECE_BYTES + TAG_BYTES)
_HEAD_BYTES, _MOST_RECORD_BYTES = 5, (1 << 14) + 256
"""Of a TLS 1.3 record: its type, version and length; then at most so much (RFC 8446, 5.2)."""


class Untrusted(Incompatible):
    """The peer is not whom this side expects; `reason` is for counting."""

    def __init__(self, reason: TurnedAway, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TlsStream(TcpStream):
    """One end, not greeted yet: `shake_hands` first; then the keys for blocks are exchanged.

    Args:
        sock: Connected.
        context: `LinkIdentity.calling` or `answering`.
        calls: Whether this end called.
        stall_s: As of `TcpStream`.
    """

    slots_at_once = 8

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, calls: bool, stall_s: float
    ) -> None:
        super().__init__(sock, stall_s=stall_s)
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=not calls)
        self._is_shaken = False
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._at = self._end = 0
        """What of `_room` has come and was not used yet."""
        self._sealing: Sealing | None = None
        self._opening: Opening | None = None

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
                if not self._feed():
                    self.wait_for_bytes(until_s)
            except ssl.SSLError as err:
                with contextlib.suppress(LinkBroken):  # Tell it, if it still listens.
                    self._flush(until_s)
                raise Untrusted(_reason(err), f"no TLS with this peer: {_what(err)}") from err
            else:
                self._flush(until_s)
                self._is_shaken = True
                return self._tls.getpeercert(binary_form=True) or b""

    def give_key(self) -> None:
        """Tell the peer, through TLS, what this end's blocks are sealed with."""
        key = new_key()
        self.send_all([key])
        self._sealing = Sealing(key)

    def take_key(self, until_s: float) -> None:
        """Hear what the peer's blocks are sealed with. Raises `LinkBroken`, `Untrusted`."""
        self._opening = Opening(self.receive(KEY_BYTES, until_s))

    def expect_blocks(self, sizes: Sequence[int]) -> None:
        """What comes next is blocks of these sizes. Raises `LinkBroken`."""
        if self._opening is None or self._tls.pending() or self._arrived.pending:
            raise LinkBroken("the peer says more than it may before its blocks")
        self._opening.expect(sizes)

    def receive_some(self, into: memoryview) -> int:
        """What was said already, at most all of `into`; 0: nothing yet.

        Raises:
            LinkBroken: the connection has ended.
            Untrusted: the peer does not trust this end.
        """
        received = self._open(into)
        while not received and self._feed():
            received = self._open(into)
        return received

    def receive_across(self, into: Sequence[memoryview]) -> int:
        """Of the blocks expected, those pieces that are there. Raises `LinkBroken`.

        Each of `into` has room for the rest of its block, or for whole pieces of it.
        """
        assert self._opening is not None
        filled = 0
        for view in into:
            at = 0
            while at < len(view):
                size = self._opening.next_bytes
                while self._end - self._at < size:
                    if filled or not self._take_in():
                        return filled
                sealed = self._room[self._at : self._at + size]
                self._at += size
                n_bytes = self._opening.open(sealed, view[at:])
                at += n_bytes
                filled += n_bytes
        return filled

    def wait_for_bytes(self, until_s: float, owed: int = 1) -> None:
        """As of `TcpStream`, unless a block's next piece is here already."""
        size = self._opening.next_bytes if self._opening is not None else 0
        if not 0 < size <= self._end - self._at:
            super().wait_for_bytes(until_s, owed)

    def wait_idle(self) -> None:
        """Wait without a limit for the peer to begin."""
        if not (self._tls.pending() or self._arrived.pending or self._at < self._end):
            super().wait_idle()

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

    def _feed(self) -> bool:
        """Give TLS its next record; whether one is there."""
        while True:
            size, there = self._record_bytes(), self._end - self._at
            if 0 < size <= there:
                self._arrived.write(self._room[self._at : self._at + size])
                self._at += size
                return True
            if not self._take_in():
                return False

    def _record_bytes(self) -> int:
        """How long the next record is; 0 if that is not known yet."""
        there, at = self._end - self._at, self._at
        if not self._is_shaken:  # It may be no TLS at all: TLS itself says so soonest.
            return there
        if there < _HEAD_BYTES:
            return 0
        size = int.from_bytes(self._room[at + 3 : at + _HEAD_BYTES], "big")
        return _HEAD_BYTES + size if size <= _MOST_RECORD_BYTES else there

    def _take_in(self) -> bool:
        """Take in what has come; whether that is anything. Raises `LinkBroken`."""
        there = self._end - self._at
        if self._at and (not there or _ROOM_BYTES - self._end < _ROOM_BYTES // 2):
            self._room[:there] = self._room[self._at : self._end]
            self._at, self._end = 0, there
        received = super().receive_some(self._room[self._end :])
        self._end += received
        return received > 0

    def _crossing(self, views: list[memoryview]) -> Iterator[list[memoryview]]:
        """The message in TLS, then the blocks sealed."""
        message, *blocks = views
        try:
            self._tls.write(message)
        except ssl.SSLError as err:
            raise LinkBroken(f"sending failed: {_what(err)}") from err
        crossing = [memoryview(self._leaving.read())]
        if blocks:
            if self._sealing is None:
                raise LinkBroken("blocks before their key")
            for sealed in self._sealing.sealed(blocks):
                yield [*crossing, sealed]
                crossing = []
        if crossing:
            yield crossing

    def _flush(self, until_s: float) -> None:
        left = self._leaving.read()
        if left:
            self._send([memoryview(left)], until_s)


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

"""A TCP connection on which no wait is without an end.

The socket does not block; waiting is `poll` with a deadline. A peer that is silent for `stall_s`
in the middle of something, or slower than a floor in the long run, is hung: `LinkBroken`.

Who waits for much is woken once there is much (`SO_RCVLOWAT`): to be woken for every 64 KiB cost
half of the speed.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence

from diptych_contracts.errors import LinkBroken

LEAST_BYTES_PER_S = 4_000_000
"""Slower than a 100 Mbit/s network is as good as hung."""
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
_MOST_BUFFERS = 128
"""Buffers given to one `sendmsg`: more than a socket's buffer has room for, or soon again."""
_WAKE_BYTES = 1 << 18
_WAKE_S = 0.05
"""A network that brings less in that time is waited for byte by byte."""


class TcpStream:
    """One end of a connection.

    `hang_up` and `has_ended` may be called from any thread, all else from one.
    """

    slots_at_once = 32
    """Into how many buffers `receive_across` is worth to be asked to receive."""

    def __init__(self, sock: socket.socket, *, stall_s: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", int(stall_s * 1000))):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._sock = sock
        self._stall_s = stall_s
        self._wakes_at_bytes = 1
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def deadline_s(self, n_bytes: int) -> float:
        """When an exchange of `n_bytes` that begins now must be over."""
        return time.monotonic() + self._stall_s + n_bytes / LEAST_BYTES_PER_S

    def send_all(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send every byte: the first buffer is a message, what follows its blocks.

        Raises:
            LinkBroken: the peer takes nothing, or too little, or has gone.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        until_s = self.deadline_s(sum(map(len, views)))
        for crossing in self._crossing(views):
            self._send(crossing, until_s)

    def give_key(self) -> None:
        """Tell the peer what blocks are sealed with; nothing, where there is no TLS."""

    def take_key(self, until_s: float) -> None:
        """Hear what the peer seals blocks with. Raises `LinkBroken`."""

    def expect_blocks(self, sizes: Sequence[int]) -> None:
        """What comes next is blocks of these sizes, for `receive_across`."""

    def receive_across(self, into: Sequence[memoryview]) -> int:
        """Of blocks, what is there already, one buffer after another. Raises `LinkBroken`."""
        try:
            received = self._sock.recvmsg_into(into)[0]
        except BlockingIOError:
            return 0
        except OSError as err:
            raise LinkBroken(f"receiving failed: {why(err)}") from err
        if not received:
            raise LinkBroken("the peer has closed the connection")
        return received

    def receive_some(self, into: memoryview) -> int:
        """What is there already, at most all of `into`; 0: nothing yet. Raises `LinkBroken`."""
        try:
            received = self._sock.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as err:
            raise LinkBroken(f"receiving failed: {why(err)}") from err
        if not received:
            raise LinkBroken("the peer has closed the connection")
        return received

    def receive(self, n_bytes: int, until_s: float) -> bytes:
        """Exactly `n_bytes`. Raises `LinkBroken`."""
        data = bytearray(n_bytes)
        rest = memoryview(data)
        while rest:
            received = self.receive_some(rest)
            if received:
                rest = rest[received:]
            else:
                self.wait_for_bytes(until_s)
        return bytes(data)

    def wait_for_bytes(self, until_s: float, owed: int = 1) -> None:
        """Wait until something has come; much, if the peer still owes much.

        Raises:
            LinkBroken: after `until_s`, or a stall.
        """
        if owed >= 2 * _WAKE_BYTES:
            self._wake_at(_WAKE_BYTES)
            if self._readable.poll(_WAKE_S * 1000):
                return
        self._wake_at(1)
        self._wait(self._readable, until_s, "is silent")

    def wait_idle(self) -> None:
        """Wait without a limit for the peer to begin. A dead peer ends it by keep-alive."""
        self._wake_at(1)
        self._readable.poll()

    def has_ended(self) -> bool:
        """Whether the peer is known to have closed; only true between two exchanges.

        Looks at the connection itself, beneath any encryption, so any thread may ask.
        """
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def hang_up(self) -> None:
        """End the connection under whoever uses it: their next call raises `LinkBroken`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. To be called by the thread that uses it, or after that thread."""
        self.hang_up()
        self._sock.close()

    def _crossing(self, views: list[memoryview]) -> Iterator[list[memoryview]]:
        """What goes through the socket for `views`."""
        yield views

    def _send(self, left: list[memoryview], until_s: float) -> None:
        at = 0
        while at < len(left):
            sent = self._send_some(left[at : at + _MOST_BUFFERS])
            if not sent:
                self._wait(self._writable, until_s, "takes nothing")
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._sock.sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as err:
            raise LinkBroken(f"sending failed: {why(err)}") from err

    def _wait(self, poll: select.poll, until_s: float, complaint: str) -> None:
        # Even a deadline long past is no reason to leave while bytes are there: it may be this
        # process that stood still.
        wait_s = max(0.0, min(self._stall_s, until_s - time.monotonic()))
        if not poll.poll(wait_s * 1000):
            raise LinkBroken(f"the peer {complaint} for too long")

    def _wake_at(self, n_bytes: int) -> None:
        if n_bytes != self._wakes_at_bytes:
            self._wakes_at_bytes = n_bytes
            with contextlib.suppress(OSError):  # Then it is woken more often.
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, n_bytes)


def why(err: OSError) -> str:
    """What the system says."""
    return os.strerror(err.errno) if err.errno else str(err)

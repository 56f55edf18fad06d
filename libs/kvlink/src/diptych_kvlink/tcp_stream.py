"""A TCP connection on which no wait is without an end.

The socket does not block; waiting is `poll` with a deadline. A peer that is silent for `stall_s`
in the middle of something, or slower than a floor in the long run, is hung: `LinkBroken`.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

from diptych_contracts.errors import LinkBroken

LEAST_BYTES_PER_S = 4_000_000
"""Slower than a 100 Mbit/s network is as good as hung."""
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
_MOST_BUFFERS = 512
"""Buffers given to one `sendmsg`; the kernel takes 1024."""


class TcpStream:
    """One end of a connection.

    `hang_up` and `has_ended` may be called from any thread, all else from one.
    """

    def __init__(self, sock: socket.socket, *, stall_s: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", int(stall_s * 1000))):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._sock = sock
        self._stall_s = stall_s

    def deadline_s(self, n_bytes: int) -> float:
        """When an exchange of `n_bytes` that begins now must be over."""
        return time.monotonic() + self._stall_s + n_bytes / LEAST_BYTES_PER_S

    def send_all(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send every byte. Raises `LinkBroken`."""
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        until_s = self.deadline_s(sum(map(len, left)))
        at = 0
        while at < len(left):
            sent = self._send_some(left[at : at + _MOST_BUFFERS])
            if not sent:
                self._wait(select.POLLOUT, until_s, "takes nothing")
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]

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

    def wait_for_bytes(self, until_s: float) -> None:
        """Wait until something has come. Raises `LinkBroken` after `until_s` or a stall."""
        self._wait(select.POLLIN, until_s, "is silent")

    def wait_idle(self) -> None:
        """Wait without a limit for the peer to begin. A dead peer ends it by keep-alive."""
        readable(self._sock)

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

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._sock.sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as err:
            raise LinkBroken(f"sending failed: {why(err)}") from err

    def _wait(self, what: int, until_s: float, complaint: str) -> None:
        # Even a deadline long past is no reason to leave while bytes are there: it may be this
        # process that stood still.
        wait_s = max(0.0, min(self._stall_s, until_s - time.monotonic()))
        if not _poll(self._sock, what, wait_s):
            raise LinkBroken(f"the peer {complaint} for too long")


def readable(sock: socket.socket) -> None:
    """Wait without a limit until there is something to read, or the end."""
    _poll(sock, select.POLLIN, None)


def _poll(sock: socket.socket, what: int, wait_s: float | None) -> bool:
    poll = select.poll()
    poll.register(sock, what)
    return bool(poll.poll(None if wait_s is None else wait_s * 1000))


def why(err: OSError) -> str:
    """What the system says."""
    return os.strerror(err.errno) if err.errno else str(err)

"""Ports for processes that a test starts, side by side with other tests."""

import contextlib
import socket
from random import SystemRandom

_PORTS = (10_000, 32_000)
"""Below Linux's ephemeral ports (`net.ipv4.ip_local_port_range` begins at 32,768)."""
_random = SystemRandom()


def free_port() -> int:
    """A port nobody listens on right now.

    One of those that the kernel gives nobody by itself: what `bind` to port 0 gives would be taken
    by somebody's client before the service listens that it is meant for.
    """
    while True:
        port = _random.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

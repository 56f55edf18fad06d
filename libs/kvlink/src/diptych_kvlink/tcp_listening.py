"""Where a `tcp` reader listens, and on which port it may."""

import socket
from dataclasses import dataclass

from diptych_contracts.errors import Permanent
from diptych_kvlink.tcp_address import is_wildcard

_BACKLOG = 16


@dataclass(frozen=True, slots=True)
class Listening:
    """Where to listen, and how patient to be."""

    host: str
    port: int
    stall_s: float
    host_id: str
    """The machine, for an endpoint that is reachable from nowhere else."""
    tls: bool = True
    """Whether nothing but TLS 1.3 is spoken."""


def listen(where: Listening) -> socket.socket:
    """The listening socket.

    Raises:
        Permanent: it cannot be, or would stand open to every network without TLS.
    """
    host, port = where.host, where.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if not where.tls and is_wildcard(str(address[0])):
            raise Permanent(
                f"KV would cross every network of this machine in the clear ({host or 'any'}, TLS "
                "off): name the address of an isolated network in KV_HOST, or leave KV_TLS required"
            )
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


def stop_listening(listener: socket.socket) -> None:
    """Wake the thread in `accept`."""
    try:
        listener.shutdown(socket.SHUT_RDWR)
    except OSError:  # Not on Linux: a last connection wakes it.
        try:
            socket.create_connection(listener.getsockname()[:2], timeout=1).close()
        except OSError:
            return

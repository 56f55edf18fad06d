"""The HTTP server: uvicorn inside the service's own event loop."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from diptych_contracts.errors import Transient
from diptych_gateway.listening.connections import HttpConnection, SocketConnection
from diptych_gateway.listening.unfinished import Unfinished

KEEP_ALIVE_S = 75
"""Longer than the 60 s after which load balancers drop idle connections themselves."""
SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel holds for a slow reader, twice that with its own overhead; left alone it grows to
4 MB each. 400 tokens, and enough for 1 MB/s over 100 ms."""
_LAST_WORDS_S = 2
_FULL_FRAMES = 64
"""Memory for WebSocket messages on their way in, in messages of the largest size."""


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections, and what WebSockets may do."""

    max_connections: int
    """At once, WebSockets included."""
    max_frame_bytes: int
    """Longest WebSocket message; a longer one closes its connection (1009)."""
    ping_s: float
    """How often a WebSocket is pinged, and how long an answer may take."""
    slow_reader_s: float = 30.0
    """A client that takes nothing is cut off after this time, or twice it."""


class HttpServer:
    """Serves `app` on one address.

    Args:
        app: The ASGI application.
        host: Address to bind.
        port: Port to bind; 0 takes a free one, see `port`.
        limits: Of its connections.
        reuse_port: Share it with others that say the same.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        limits: ConnectionLimits,
        reuse_port: bool = False,
    ) -> None:
        self.app = app
        self._host = host
        self._wanted_port = port
        self.reuse_port = reuse_port
        self._socket: socket.socket | None = None
        unfinished = Unfinished(_FULL_FRAMES * limits.max_frame_bytes)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=type(
                    "Http",
                    (HttpConnection,),
                    {
                        "max_connections": limits.max_connections,
                        "slow_reader_s": limits.slow_reader_s,
                    },
                ),
                ws=type("Socket", (SocketConnection,), {"unfinished": unfinished}),
                ws_max_size=limits.max_frame_bytes,
                ws_ping_interval=limits.ping_s,
                ws_ping_timeout=limits.ping_s,
                ws_per_message_deflate=False,  # frames hold one token: nothing to gain
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )

    @property
    def port(self) -> int:
        """The port in use; 0 before `bind`."""
        return int(self._socket.getsockname()[1]) if self._socket is not None else 0

    @property
    def started(self) -> bool:
        """Whether connections are taken."""
        return self._server.started

    def bind(self) -> None:
        """Take the address.

        Raises:
            Transient: somebody else has it.
        """
        where = f"{self._host}:{self._wanted_port}"
        try:
            family, *_, address = socket.getaddrinfo(
                self._host, self._wanted_port, type=socket.SOCK_STREAM
            )[0]
            self._socket = _bound(family, address, reuse_port=self.reuse_port)
        except OSError as err:
            raise Transient(f"cannot listen on {where}: {err.strerror}") from err

    async def run(self) -> None:
        """Serve until `stop`."""
        assert self._socket is not None, "bind comes first"
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the port to the others that share it; connections there are get one more answer."""
        self._close_port()
        for connection in self._connections():
            connection.last = True

    def close(self) -> None:
        """Leave the port and cut what is still connected: nothing of that is left after `stop`."""
        self._close_port()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def _close_port(self) -> None:
        for server in self._server.servers if self.started else ():
            server.close()
        if self._socket is not None:
            self._socket.close()

    def hang_up(self) -> None:
        """Close what is idle, and the others once they have their answer."""
        for connection in self._connections():
            connection.shutdown()

    def _connections(self) -> list[HttpConnection]:
        return [c for c in self._server.server_state.connections if isinstance(c, HttpConnection)]

    def stop(self) -> None:
        """Take no more connections, and end when those there are have gone quiet."""
        self._server.should_exit = True


def _bound(family: int, address: Any, *, reuse_port: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock

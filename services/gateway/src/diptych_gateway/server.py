"""The HTTP server: uvicorn inside the service's own event loop."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from diptych_contracts.errors import Transient
from diptych_gateway.connections import HttpConnection, SocketConnection

KEEP_ALIVE_S = 75
"""Longer than the 60 s after which load balancers drop idle connections themselves."""
_LAST_WORDS_S = 2


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves `app` on one address.

    Args:
        app: The ASGI application.
        host: Address to bind.
        port: Port to bind; 0 takes a free one, see `port`.
        max_frame_bytes: Longest WebSocket message; a longer one closes its connection (1009).
        ping_s: How often a WebSocket is pinged, and how long an answer may take.
        reuse_port: Share it with others that say the same.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        max_frame_bytes: int,
        ping_s: float,
        reuse_port: bool = False,
    ) -> None:
        self.app = app
        self._host = host
        self._wanted_port = port
        self.reuse_port = reuse_port
        self._socket: socket.socket | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=HttpConnection,
                ws=SocketConnection,
                ws_max_size=max_frame_bytes,
                ws_ping_interval=ping_s,
                ws_ping_timeout=ping_s,
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
        await self._server.serve(sockets=[self._socket])

    def leave(self) -> None:
        """Leave the port to the others that share it; connections there are get one more answer."""
        for server in self._server.servers if self.started else ():
            server.close()
        if self._socket is not None:
            self._socket.close()
        for connection in self._connections():
            connection.last = True

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
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock

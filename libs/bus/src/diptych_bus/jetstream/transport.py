"""The socket nats-py writes to: an end to waiting for a dead peer, and TLS from the first byte.

nats-py waits without limit for a closing socket to drain, which a frozen server never lets happen,
and for one that leaves to take what is still to be said; it forgets half-open sockets when it tries
the next server. Its own change to TLS in mid-connection
leaves a plain socket behind that nobody closes.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

DRAIN_S = 0.2
"""How long a closing socket may take to write what it holds."""
LEAVE_S = 2.0
"""How long a client that leaves waits for a server that does not read."""


class AbortingTransport(TcpTransport):
    """A TCP transport that is given up, not waited for.

    Args:
        tls: What each connection believes; None: a plain one.
    """

    def __init__(self, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tls = tls
        self.leaving = False
        """Whether its client closes: nobody pings the server any more, so no wait may be long."""

    def __bool__(self) -> bool:
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect anew; a socket left from a failed attempt is dropped."""
        self._abort()
        self.leaving = False
        if self._tls is None:
            await super().connect(uri, buffer_size, connect_timeout)
            return
        async with asyncio.timeout(connect_timeout):
            self._io_reader, self._io_writer = await asyncio.open_connection(
                uri.hostname,
                uri.port,
                limit=buffer_size,
                ssl=self._tls(),
                server_hostname=uri.hostname,
                ssl_shutdown_timeout=DRAIN_S,
            )

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,
        connect_timeout: int,
    ) -> None:
        """It is TLS already."""
        if self._tls is None:
            await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)

    async def drain(self) -> None:
        """Wait until what is written is mostly gone; a client that leaves gives up in the end."""
        if not self.leaving:
            await super().drain()  # type: ignore[no-untyped-call]
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await super().drain()  # type: ignore[no-untyped-call]
        except (TimeoutError, OSError):
            self._abort()

    def close(self) -> None:
        """Start closing."""
        if self._io_writer is not None:
            self._io_writer.close()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed, then drop what it still holds."""
        if self._io_writer is None:
            return
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._io_writer.wait_closed()
        except (TimeoutError, OSError):
            self._abort()

    def _abort(self) -> None:
        writer: Any = self._io_writer
        if writer is not None:
            writer.transport.abort()

"""The socket nats-py writes to: an end to waiting for a dead peer, and TLS from the first byte.

nats-py waits without limit for a closing socket to drain, which a frozen server never lets happen,
and forgets half-open sockets when it tries the next server. Its own change to TLS in mid-connection
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


class AbortingTransport(TcpTransport):
    """A TCP transport that is given up, not waited for.

    Args:
        tls: What each connection believes; None: a plain one.
    """

    def __init__(self, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tls = tls

    def __bool__(self) -> bool:
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect anew; a socket left from a failed attempt is dropped."""
        self._abort()
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

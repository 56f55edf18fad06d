"""nats-py's client with an identity of ours, which may be renewed while it is connected.

And with an end: nats-py connects inside `wait_for`, which before Python 3.12 swallows a
cancellation that arrives together with the answer, or the refusal. Its loops then try again for
ever, and a client that was closed would come back.

And with the tasks of one connection only: where nats-py fails between the server's first word and
its own last one, it leaves what reads, pings and flushes behind, and begins again.
"""

import asyncio
import base64
import ssl
from collections.abc import Mapping
from typing import Any

import nats.errors
from nats.aio.client import Client, Srv

from diptych_bus.access import Access
from diptych_bus.jetstream.transport import AbortingTransport
from diptych_bus.lifetime import heeding, stop
from diptych_contracts.errors import Permanent

_NOT_BELIEVED = ("authorization violation", "authentication", "maximum subscriptions exceeded")
"""The last one is said where the key that signed the identity is no more: nothing is allowed."""
_NOT_ALLOWED = "permissions violation"
"""The one error after which the server goes on with a connection."""
_STREAM_HEADER = b"\r\nNats-Stream:"
REFLECTED = "Diptych-Reflected"
"""Set here, on what the server itself sent on from a stream into another one (`genuine`)."""


class IdentifiedClient(Client):
    """A client that connects again where nats-py would close: its identity may be a new one."""

    def __init__(self, access: Access | None = None) -> None:
        super().__init__()
        self._access = access
        tls = None if access is None else access.tls
        self._transport: AbortingTransport = AbortingTransport(tls)
        self.refusals = 0
        """How often the server did not believe it since it last did."""

    async def connect_as(self, url: str, **options: Any) -> None:
        """As `connect`, with the identity."""
        await self.connect(url, **_identified(self._access), **options)

    async def _process_err(self, err_msg: str) -> None:
        """Connect again after what ends a connection: nats-py would end the client.

        Where the key that signed the identity is retired while something is sent, the server says
        "maximum payload exceeded" first: nothing is allowed, so no byte is.
        """
        if _NOT_ALLOWED in err_msg.lower():
            await super()._process_err(err_msg)
        else:
            err = nats.errors.Error(f"nats: {err_msg}")
            await self._error_cb(err)
            await self._process_op_err(err)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        ended = self.is_closed
        self._transport.leaving = True
        healing = self._reconnection_task
        await super()._close(status, do_cbs)
        if healing is not None and healing is not asyncio.current_task():
            await stop(healing)
        if not (ended or self.is_closed):  # it came back just before it was stopped
            self._transport.leaving = True
            await super()._close(status, False)

    async def _connect_to_server(self, s: Srv) -> None:
        self._end_tasks()
        await heeding(super()._connect_to_server(s))

    def _end_tasks(self) -> None:
        """Of the connection before: three that ping are one that the server is too slow for."""
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()

    async def _process_connect_init(self) -> None:
        try:
            await heeding(super()._process_connect_init())
            if not self.is_connected:
                self._end_tasks()
                raise nats.errors.Error("nats: the server left without a word")
        except nats.errors.Error as err:
            self.refusals += any(reason in str(err).lower() for reason in _NOT_BELIEVED)
            raise
        except Permanent as err:  # the file is being changed, or is gone
            self.refusals += 1
            raise nats.errors.Error(str(err)) from err
        self.refusals = 0

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        parsed: dict[str, str] | None = await super()._process_headers(headers)
        if parsed and headers.count(_STREAM_HEADER) > 1:
            parsed[REFLECTED] = "1"
        return parsed


def _identified(access: Access | None) -> Mapping[str, Any]:
    if access is None:
        return {}
    context: ssl.SSLContext = access.tls()

    def signature(challenge: str) -> bytes:
        return base64.b64encode(access.renewed().answer(challenge))

    return {
        "tls": context,
        "tls_handshake_first": True,
        "signature_cb": signature,
        "user_jwt_cb": lambda: access.identity.jwt.encode(),
        "inbox_prefix": access.inbox_prefix,
    }

"""A real gateway without sockets: its ASGI application, called in the gateway's own life.

So it can be frozen, cut off and killed in virtual time like any member. Only the HTTP server is
missing: what it does with connections is proved elsewhere, on real ones.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from diptych_chassis.member import Member
from diptych_gateway.app import assemble
from diptych_gateway.listening.server import HttpServer
from diptych_gateway.settings import GatewaySettings
from diptych_testkit.small_fleet import Life, SmallFleet


class ConnectionLost(Exception):
    """The gateway died, or said nothing for too long."""


class NoServer(HttpServer):
    """In the place of the HTTP server."""

    def __init__(self) -> None:
        self.reuse_port = False
        self._stopped = asyncio.Event()

    @property
    def port(self) -> int:
        return 0

    def bind(self) -> None:
        pass

    async def run(self) -> None:
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        pass


class VirtualGateway:
    """One life of a gateway in `fleet`."""

    def __init__(self, fleet: SmallFleet, name: str, **settings: Any) -> None:
        self._app: ASGIApp
        self.life: Life = fleet.join("gateway", name, lambda member: self._serve(member, settings))

    async def _serve(self, member: Member, settings: dict[str, Any]) -> None:
        with ThreadPoolExecutor(1) as executor:  # its work is done in the loop
            made = assemble(member, GatewaySettings(**settings), executor)
            self._app = made.server.app
            await replace(made, server=NoServer()).run()

    def ask(self, method: str, path: str, query: str = "", body: object = None) -> "Exchange":
        """Send a request."""
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(b"content-type", b"application/json")],
        }
        exchange = Exchange(json.dumps(body).encode() if body is not None else b"")
        answering = self._app(scope, exchange.receive, exchange.send)
        context = self.life.context.copy()
        loop = asyncio.get_running_loop()
        task: asyncio.Task[Any] = loop.create_task(answering, context=context)  # type: ignore[arg-type]
        task.add_done_callback(exchange.over)
        return exchange


class Exchange:
    """A client's view of one request and its answer."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def receive(self) -> Message:
        """For the application: the body, and then nothing until the client leaves."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """For the application: what the client is to get."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not self._left.is_set():
            self._came.put_nowait(message.get("body", b""))
            if not message.get("more_body", False):
                self._came.put_nowait(None)

    def over(self, task: asyncio.Task[Any]) -> None:
        """The application is done with it, or dead."""
        if task.cancelled() or task.exception() is not None:
            self._left.set()
        self._came.put_nowait(None)

    def leave(self) -> None:
        """The client is gone."""
        self._left.set()

    async def events(self, silence_s: float) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events, until the answer or its connection ends.

        Raises:
            ConnectionLost: nothing came for `silence_s`.
        """
        rest = b""
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    part = await self._came.get()
            except TimeoutError as err:
                raise ConnectionLost(f"silent for {silence_s:g} s") from err
            if part is None:
                return
            *whole, rest = (rest + part).split(b"\n\n")
            for event in whole:
                for line in event.splitlines():
                    if line.startswith(b"data: {"):
                        yield json.loads(line.removeprefix(b"data: "))

"""A real HTTP server on a free port that takes what its contract has, and nothing else."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import uvicorn

from diptych_engine.over_http.contract import Call, Contract, faults, shaped
from diptych_testkit.ports import free_port

_STOP_S = 10.0
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Exchange:
    """One request and its answer."""

    def __init__(
        self, call: Call, body: Any, headers: dict[str, str], send: Send, left: "asyncio.Task[Any]"
    ) -> None:
        self.call = call
        self.body = body
        self.headers = headers
        self.query = ""
        self._send = send
        self._left = left
        self._streams = False

    @property
    def left(self) -> bool:
        """Whether the client has gone."""
        return self._left.done()

    async def wait(self, seconds: float) -> None:
        """So long, or until the client goes."""
        if seconds > 0:
            await asyncio.wait([self._left], timeout=seconds)
        else:
            await asyncio.sleep(0)

    async def text(self, status: int, text: bytes, kind: str = "application/json") -> None:
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(text))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": text})

    async def json(self, answer: dict[str, Any]) -> None:
        """An answer of 200, of the fields the contract has."""
        await self.text(200, msgspec.json.encode(shaped(self.call.response, answer)))

    async def error(self, status: int, message: str) -> None:
        body = {"error": {"message": message, "type": "Error", "code": status}}
        await self.text(status, msgspec.json.encode(body))

    async def event(self, answer: dict[str, Any]) -> None:
        """An event of the fields the contract has."""
        await self.raw_event(msgspec.json.encode(shaped(self.call.response, answer)))

    async def raw_event(self, data: bytes) -> None:
        if not self._streams:
            self._streams = True
            headers = [(b"content-type", b"text/event-stream")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        part = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def done(self) -> None:
        await self.raw_event(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b""})


Handler = Callable[[Exchange], Awaitable[None]]
Handlers = Mapping[str, Handler]


class StrictServer:
    """A server of `contract`.

    Args:
        contract: What it takes and gives.
        handlers: What it does, by the name of the call.
    """

    def __init__(self, contract: Contract, handlers: Handlers) -> None:
        self.contract = contract
        self.faults: list[str] = []
        """What a test must not see."""
        self.asked: list[tuple[str, Any]] = []
        self.keys: set[str] = set()
        """What it was asked by."""
        self.open = 0
        """Requests that run."""
        self.port = free_port()
        self._calls = {(c.method, c.path): (name, c) for name, c in contract.calls.items()}
        self._handlers = handlers
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                log_level="critical",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def see(self, right: bool, fault: str) -> None:
        """Note `fault` unless all is right."""
        if not right:
            self.faults.append(fault)

    def start(self) -> None:
        """Listen; returns once it does."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(256)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), daemon=True)
        self._thread.start()
        ready.wait(_STOP_S)

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            ready.set()
            await self._server.serve(sockets=[listener])

        asyncio.run(serve())
        listener.close()

    def die(self) -> None:
        """As a process that is killed: connections break, and nobody listens."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._break)

    def _break(self) -> None:
        for listening in self._server.servers:
            listening.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True

    def stop(self) -> None:
        self.die()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    async def _app(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        data, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            data += message.get("body", b"")
            more = message.get("more_body", False)
        left = asyncio.ensure_future(receive())
        self.open += 1
        try:
            await self._dispatch(scope, data, send, left)
        except Exception as err:
            self.faults.append(f"{scope['path']}: {err!r}")
            raise
        finally:
            self.open -= 1
            left.cancel()

    async def _dispatch(
        self, scope: Any, data: bytes, send: Send, left: "asyncio.Task[Any]"
    ) -> None:
        name, call = self._calls.get((scope["method"], scope["path"]), ("", Call("", "")))
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        body = msgspec.json.decode(data) if data else {}
        exchange = Exchange(call, body, headers, send, left)
        exchange.query = scope["query_string"].decode()
        if not name or name not in self._handlers:
            self.faults.append(f"{scope['method']} {scope['path']} is no part of the contract")
            await exchange.error(404, "Not Found")
            return
        self.asked.append((name, body))
        self.keys.add(headers.get("authorization", ""))
        if body or call.request:
            wrong = list(faults(call.request, body))
            if wrong and body:
                self.faults += [f"{name}: {fault}" for fault in wrong]
        await self._handlers[name](exchange)

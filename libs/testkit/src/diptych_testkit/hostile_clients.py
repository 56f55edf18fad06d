"""Clients that send what `hostile` draws, and judge what comes back.

Every answer must be one that is documented: its status, its code, the shape of its error object. A
request whose HTTP is intact must have an answer; one whose HTTP is bent may lose its connection.
"""

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from diptych_testkit.hostile import Hostility, Sent

PATIENCE_S = 120.0
"""Silence for this long is a fault."""
_LONG_BYTES = 256 * 1024
"""Of an answer, after which a client has seen enough."""
_LONG_EVENTS = 500
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
_CLOSES = (1000, 1001, 1002, 1003, 1005, 1006, 1007, 1009, 1010)
_NO_BODY = (204, 304)

Documented = Mapping[int, frozenset[str]]
"""Codes that may stand beside a status."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    complete: bool = True
    """False: there was more than anybody wants to read."""


@dataclass(slots=True)
class Judge:
    """Counts answers, and notes each that is not documented."""

    documented: Documented
    seen: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, sent: object, what: str) -> None:
        """Note that `sent` met something nobody could have expected."""
        self.faults.append(f"{sent!r:.600}\n  {what}")

    def answer(self, answer: Answer, *, of: bytes) -> None:
        """Judge an HTTP answer to the request `of`."""
        try:
            code = self._code(answer)
        except (ValueError, KeyError, TypeError, AssertionError) as err:
            words = f"{answer.status} {answer.headers} {answer.body[:500]!r}"
            self.fault(of, f"was answered {words}: {err!r}")
            return
        self.seen[f"{answer.status} {code}".strip()] += 1

    def error(self, status: int, error: Any, *, of: object) -> None:
        """Judge an error object."""
        try:
            code = self._error(status, error)
        except (KeyError, TypeError, AssertionError) as err:
            self.fault(of, f"was answered {status} {error}: {err!r}")
            return
        self.seen[f"frame {status} {code}"] += 1

    def _code(self, answer: Answer) -> str:
        assert answer.status in self.documented, "this status is not documented"
        if answer.status >= 400 and answer.headers.get("content-length") != "0" and answer.body:
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-request-id"]
            return self._error(answer.status, json.loads(answer.body)["error"])
        kind = answer.headers.get("content-type", "")
        if kind.startswith("text/event-stream") and answer.complete:
            assert answer.body.rstrip().endswith(b"data: [DONE]") or b'"error"' in answer.body
        elif kind.startswith("application/json") and answer.complete and answer.body:
            json.loads(answer.body)
        return ""

    def _error(self, status: int, error: Any) -> str:
        assert set(error) - {"headers"} == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["param"], str | None), "a name or nothing"
        code: str = error["code"]
        assert code in self.documented.get(status, ()), f"{code} is not documented for {status}"
        return code


class HttpClient:
    """Sends requests one after another, over one connection as long as it lasts."""

    def __init__(self, port: int, hostility: Hostility, judge: Judge) -> None:
        self._port = port
        self._hostility = hostility
        self._judge = judge
        self._line: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, requests: int) -> None:
        """Send that many."""
        try:
            for _ in range(requests):
                await self._ask(self._hostility.request())
        finally:
            self._hang_up()

    async def _ask(self, sent: Sent) -> None:
        if not sent.whole:
            await self._break(sent)
            return
        for fresh in (self._line is None, True):
            answer = await self._answer(sent)
            if answer is not None:
                self._judge.answer(answer, of=sent.raw)
                if not answer.complete or answer.headers.get("connection") == "close":
                    self._hang_up()
                return
            self._hang_up()  # the connection had been closed meanwhile
            if fresh:
                break
        self._judge.fault(sent.raw, "was not answered")

    async def _answer(self, sent: Sent) -> Answer | None:
        if self._line is None:
            self._line = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._line
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(sent.raw)  # a refusal may come before all of it was taken
                return await read_answer(reader, head_only=sent.method == "HEAD")
        except (OSError, asyncio.IncompleteReadError):  # also after silence
            return None

    async def _break(self, sent: Sent) -> None:
        """Send what is hardly HTTP on a connection of its own; judge what is answered at all."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        count = 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(OSError):
                    writer.write(sent.raw)
                    writer.write_eof()
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    while (answer := await read_answer(reader)) is not None and answer.complete:
                        if answer.status != 100:
                            self._judge.answer(answer, of=sent.raw)
                            count += 1
        except TimeoutError:
            self._judge.fault(sent.raw, "met silence")
        finally:
            writer.close()
        self._judge.seen["hung up on"] += not count

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line[1].close()
            self._line = None


async def read_answer(reader: asyncio.StreamReader, *, head_only: bool = False) -> Answer | None:
    """The next answer; None at the end of the connection.

    Raises:
        asyncio.IncompleteReadError: the connection ended in the middle.
    """
    first = await reader.readline()
    if not first:
        return None
    status = int(first.split()[1])
    headers: dict[str, str] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if status == 100:
        return await read_answer(reader, head_only=head_only)
    if head_only or status in _NO_BODY:
        return Answer(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        return await _read_chunks(reader, status, headers)
    return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))


async def _read_chunks(
    reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]
) -> Answer:
    body = bytearray()
    while size := int(await reader.readline() or b"x", 16):
        body += (await reader.readexactly(size + 2))[:-2]
        if len(body) > _LONG_BYTES:
            return Answer(status, headers, bytes(body), complete=False)
    await reader.readexactly(2)
    return Answer(status, headers, bytes(body))


class SocketClient:
    """Sends frames, one after another, over one WebSocket as long as it lasts."""

    def __init__(self, port: int, hostility: Hostility, judge: Judge) -> None:
        self._url = f"ws://127.0.0.1:{port}/v1/responses"
        self._port = port
        self._hostility = hostility
        self._judge = judge

    async def run(self, frames: int) -> None:
        """Send that many."""
        left = frames
        while left:
            async with connect(self._url, max_size=None, compression=None) as socket:
                while left:
                    left -= 1
                    frame = self._hostility.frame()
                    try:
                        if not await self._exchange(socket, frame):
                            break
                    except ConnectionClosed as err:
                        code = err.rcvd.code if err.rcvd else 1006
                        self._judge.fault(frame, f"closed the socket with {code}")
                        break

    async def _exchange(self, socket: Any, frame: str | bytes) -> bool:
        """Send one frame; False if its answer is longer than anybody wants to read."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await socket.send(frame)
                for _ in range(_LONG_EVENTS):
                    event = json.loads(await socket.recv())
                    if event["type"] in _ENDS:
                        break
                else:
                    return False
        except TimeoutError:
            self._judge.fault(frame, "met silence")
            return False
        if event["type"] == "error":
            self._judge.error(event["status"], event["error"], of=frame)
        else:
            self._judge.seen[f"frame {event['type']}"] += 1
        return True

    async def break_wire(self, times: int) -> None:
        """Open that many sockets by hand, and send bytes that are hardly frames."""
        for _ in range(times):
            await self._wire()

    async def _wire(self) -> None:
        handshake, wire = self._hostility.handshake(), self._hostility.wire()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(handshake)
                upgraded = await _upgraded(reader)
                with contextlib.suppress(OSError):
                    writer.write(wire if upgraded is None else b"")
                    writer.write_eof()
                if upgraded is None:
                    self._judge_close(await _rest(reader), of=wire)
                else:
                    self._judge.answer(upgraded, of=handshake)
        except (TimeoutError, asyncio.IncompleteReadError):
            self._judge.fault(handshake + wire, "met silence")
        finally:
            writer.close()

    def _judge_close(self, data: bytes, *, of: bytes) -> None:
        code = close_code(data)
        if code not in _CLOSES:
            self._judge.fault(of, f"closed the socket with {code}")
            return
        self._judge.seen[f"closed {code}"] += 1


async def _upgraded(reader: asyncio.StreamReader) -> Answer | None:
    """What a handshake was answered, unless it made a WebSocket."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 101 "):
        return None
    again = asyncio.StreamReader()
    again.feed_data(head)
    size = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    again.feed_data(await reader.readexactly(int(size[1]) if size else 0))
    again.feed_eof()
    return await read_answer(again)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """What still comes; a connection that is reset ends it, too."""
    data = b""
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            data += piece
    return data


def close_code(data: bytes) -> int:
    """The code in the close frame among the server's frames `data`; 1006 if there is none."""
    at = 0
    while at + 2 <= len(data):
        opcode, size = data[at] & 0x0F, data[at + 1]
        at += 2
        if size >= 126:
            width = 2 if size == 126 else 8
            size = int.from_bytes(data[at : at + width], "big")
            at += width
        if opcode == 8:
            return int.from_bytes(data[at : at + 2], "big") if size else 1005
        at += size
    return 1006

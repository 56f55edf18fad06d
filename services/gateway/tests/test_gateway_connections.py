"""Raw bytes at the door: heads that do not end, half-closed clients, what is no HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from diptych_contracts.journal import EndReason
from diptych_gateway.listening import connections, server
from diptych_gateway.listening.connections import MAX_FIELDS, MAX_HEAD_BYTES

GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


class Raw:
    """A client that writes bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(60):
            status = 100
            while status == 100:
                head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
                line, *fields = head.strip().split("\r\n")
                status = int(line.split()[1])
            named = (field.split(": ", 1) for field in fields)
            headers = {name.lower(): value for name, value in named}
            length = headers.get("content-length")
            body = b"" if length is None else await self.reader.readexactly(int(length))
            return status, headers, body

    async def rest(self) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.read()


@asynccontextmanager
async def connected(stack: Any) -> AsyncIterator[Raw]:
    port = stack.gateway.server.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def chat(stack: Any, version: bytes = b"1.1", **changes: Any) -> bytes:
    body = json.dumps(stack.body(**changes)).encode()
    head = POST.replace(b"HTTP/1.1", b"HTTP/" + version)
    return head + b"content-length: %d\r\n\r\n%s" % (len(body), body)


async def refused(raw: Raw) -> tuple[int, str]:
    status, headers, body = await raw.answer()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(headers["x-request-id"]) == 32
    assert await raw.rest() == b""
    return status, error["code"]


@pytest.mark.parametrize("start", [GET, POST, UPGRADE], ids=["get", "post", "upgrade"])
@pytest.mark.parametrize(
    "more",
    [
        b"x: " + b"a" * 2_000_000,
        b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"x: a\r\n" * (MAX_FIELDS + 1) + b"\r\n",
    ],
    ids=["endless", "large", "fields"],
)
async def test_a_head_has_limits(stack: Any, start: bytes, more: bytes) -> None:
    async with connected(stack) as raw:
        raw.writer.write(start + more)
        assert await refused(raw) == (431, "head_too_large")
    assert (await stack.chat()).status_code == 200


async def test_a_head_that_comes_in_pieces_has_the_same_limits(stack: Any) -> None:
    async with connected(stack) as raw:
        raw.writer.write(GET + b"x: ")
        for _ in range(MAX_HEAD_BYTES // 8192 + 1):
            raw.writer.write(b"a" * 8192)
            await raw.writer.drain()
            await asyncio.sleep(0.001)
        assert await refused(raw) == (431, "head_too_large")


async def test_a_body_is_no_head(stack: Any) -> None:
    async with connected(stack) as raw:
        for _ in range(3):
            raw.writer.write(chat(stack, messages=[{"role": "user", "content": "a" * 200_000}]))
            status, _, body = await raw.answer()
            assert json.loads(body)["error"]["code"] == "context_length_exceeded", status


@pytest.mark.parametrize(
    "tail",
    [b"1;%s\r\n \r\n" % (b"a" * 300_000), b"0\r\nx: %s" % (b"a" * 300_000)],
    ids=["extension", "trailer"],
)
async def test_what_goes_with_chunks_has_limits_too(stack: Any, tail: bytes) -> None:
    async with connected(stack) as raw:
        raw.writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + tail)
        assert await refused(raw) == (431, "head_too_large")
    await stack.until(lambda: not stack.gateway.admission.in_flight)


async def test_trailers_change_no_header(stack: Any) -> None:
    body = json.dumps(stack.body()).encode()
    async with connected(stack) as raw:
        chunk = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
        raw.writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + chunk)
        raw.writer.write(b"x-diptych-resume: 7\r\n\r\n")
        assert (await raw.answer())[0] == 200


@pytest.mark.parametrize("start", [GET, UPGRADE], ids=["get", "upgrade"])
async def test_a_head_has_a_time(stack: Any, monkeypatch: Any, start: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    async with connected(stack) as raw:
        raw.writer.write(start)
        assert await refused(raw) == (408, "head_timeout")


async def test_idle_connections_are_closed(run_stack: Any, hello: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)
    whole = GET + b"\r\n"
    async with run_stack(hello) as stack:
        for sent in (b"", b"\r\n", whole):
            async with connected(stack) as raw:
                raw.writer.write(sent)
                if sent == whole:
                    assert (await raw.answer())[0] == 200
                assert await raw.rest() == b""


async def test_a_client_may_not_send_a_refused_body_for_ever(stack: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    async with connected(stack) as raw:
        raw.writer.write(POST + b"content-length: 9000000\r\n\r\n")
        assert (await raw.answer())[0] == 413
        raw.writer.write(b"a" * 1000)
        with suppress(ConnectionResetError):  # where it came too late to be read
            assert await raw.rest() == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
    ],
    ids=["tls", "both", "two", "negative", "chunk"],
)
async def test_what_is_no_http_gets_an_error_object(stack: Any, sent: bytes) -> None:
    async with connected(stack) as raw:
        raw.writer.write(sent)
        assert await refused(raw) == (400, "invalid_http")
    await stack.until(lambda: not stack.gateway.admission.in_flight)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"sec-websocket-version: 13", b"x: y", (400, "invalid_handshake")),
        (b"AAAAAAAAAAAAAAAAAAAAAA==", b"\xff\xff", (400, "invalid_handshake")),
        (b"GET", b"POST", (405, "method_not_allowed")),
        (b"host: x", b"host: " + b"x" * 9000, (431, "head_too_large")),
        (b"/v1/responses", b"/v1/responses?a=" + b"x" * 9000, (431, "head_too_large")),
        (b"/v1/responses", b"/v1/nowhere", (404, "not_found")),
    ],
    ids=["version", "key", "method", "field", "path", "nowhere"],
)
async def test_what_is_no_handshake_gets_an_error_object(
    stack: Any, caplog: Any, old: bytes, new: bytes, expected: tuple[int, str]
) -> None:
    async with connected(stack) as raw:
        raw.writer.write(UPGRADE.replace(old, new) + b"\r\n")
        assert await refused(raw) == expected
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_garbage_behind_a_request_does_not_cost_it_its_answer(stack: Any) -> None:
    async with connected(stack) as raw:
        raw.writer.write(chat(stack) + b"\x00garbage\r\n\r\n")
        status, headers, _ = await raw.answer()
        assert (status, headers.get("connection")) == (200, "close")
        assert await raw.rest() == b""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_client_gets_its_answer(run_stack: Any, stream: bool) -> None:
    async def script(fleet: Any, request: Any) -> None:
        await asyncio.sleep(0.4)
        fleet.say(request, fleet.ids("Hello"))
        await asyncio.sleep(0.4)
        fleet.say(request, fleet.ids(" world"), index=1, end=EndReason.STOP)

    async with run_stack(script) as stack, connected(stack) as raw:
        raw.writer.write(chat(stack, stream=stream))
        raw.writer.write_eof()
        assert (await raw.answer())[0] == 200
        rest = await raw.rest()
        assert not stream or rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("half_closed_s", [None, 0.1])
async def test_a_client_that_left_is_noticed(
    run_stack: Any, stream: bool, begun: bool, half_closed_s: float | None
) -> None:
    async def script(fleet: Any, request: Any) -> None:
        if begun:
            fleet.say(request, fleet.ids("Hello"))

    async with run_stack(script) as stack:
        async with connected(stack) as raw:
            raw.writer.write(chat(stack, stream=stream))
            await stack.until(lambda: stack.fleet.requests)
            if begun and stream:
                await raw.answer()
            if half_closed_s is not None:
                raw.writer.write_eof()
                await asyncio.sleep(half_closed_s)
        record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
        assert record.state == "cancelling"


async def test_half_a_request_is_not_waited_for(stack: Any) -> None:
    for sent in (GET, POST + b"content-length: 10\r\n\r\n{", GET + b"\r\n" + GET):
        async with connected(stack) as raw:
            raw.writer.write(sent)
            raw.writer.write_eof()
            await raw.rest()
    await stack.until(lambda: not stack.gateway.admission.in_flight)
    assert stack.fleet.requests == []

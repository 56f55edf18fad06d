import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from diptych_chassis import health


@pytest.fixture
async def server() -> AsyncIterator[health.HealthServer]:
    pages = {
        "/health/live": lambda: health.verdict(True, silent_s=0.1),
        "/health/ready": lambda: health.verdict(False, detail="loading the model"),
        "/metrics": lambda: health.Answer(200, b"up 1\n", "text/plain"),
    }
    server = health.HealthServer("127.0.0.1", 0, pages)
    await server.start()
    yield server
    await server.close()


async def ask(server: health.HealthServer, request: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    try:
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split(" ")[1]), headers, body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def test_a_good_probe_is_200(server: health.HealthServer) -> None:
    status, headers, body = await ask(server, get("/health/live"))
    assert (status, json.loads(body)) == (200, {"ok": True, "silent_s": 0.1})
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)


async def test_a_bad_probe_is_503_and_says_why(server: health.HealthServer) -> None:
    status, _, body = await ask(server, get("/health/ready?verbose=1"))
    assert (status, json.loads(body)) == (503, {"ok": False, "detail": "loading the model"})


async def test_metrics_keep_their_type(server: health.HealthServer) -> None:
    status, headers, body = await ask(server, get("/metrics"))
    assert (status, headers["content-type"], body) == (200, "text/plain", b"up 1\n")


async def test_head_sends_no_body(server: health.HealthServer) -> None:
    status, headers, body = await ask(server, get("/metrics", "HEAD"))
    assert (status, headers["content-length"], body) == (200, "5", b"")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/nowhere"), 404),
        (get("/metrics", "POST"), 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics SPDY/3\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 10_000, 431),
    ],
)
async def test_odd_requests_get_a_status(
    server: health.HealthServer, request_bytes: bytes, status: int
) -> None:
    assert (await ask(server, request_bytes))[0] == status


async def test_a_silent_peer_is_let_go(
    server: health.HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_TIMEOUT_S", 0.05)
    assert (await ask(server, b"GET /metrics"))[0] == 408


async def test_a_taken_port_is_an_error(server: health.HealthServer) -> None:
    with pytest.raises(OSError, match="in use"):
        await health.HealthServer("127.0.0.1", server.port, {}).start()

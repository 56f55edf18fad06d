"""Paths, limits, refusals and health."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest

from diptych_contracts.errors import Transient
from diptych_contracts.fleet import WorkerRegistration
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS, WORKERS
from diptych_gateway.listening.server import ConnectionLimits, HttpServer

CHAT = "/v1/chat/completions"


async def test_models_are_those_workers_offer(stack: Any) -> None:
    listed = (await stack.client.get("/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == ["tiny"]
    one = (await stack.client.get("/v1/models/tiny")).json()
    assert one == listed["data"][0]
    assert one["object"] == "model"
    assert one["context_length"] == 2048


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/huge%2Fmodel", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_wrong_paths_and_methods_get_an_error_object(
    stack: Any, method: str, path: str, status: int
) -> None:
    response = await stack.client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(response.headers["x-request-id"]) == 32


async def test_a_base_url_without_v1_is_told_where_paths_are(stack: Any) -> None:
    response = await stack.client.post("/chat/completions", json={})
    assert response.status_code == 404
    message = (
        "there is nothing at POST /chat/completions; /docs names every path, most begin with /v1"
    )
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b'{"model":"\xff"}', {}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {"content-type": "application/json; charset=utf-16"}, 415, None),
        (b"{}", {"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        (b" " * 10_000_000, {}, 413, "body_too_large"),
        (json.dumps({"model": "x", "messages": [{"role": "user", "content": "a"}]}).encode(),
         {}, 404, "model_not_found"),
    ],
    ids=["json", "utf8", "type", "charset", "gzip", "huge", "model"],
)  # fmt: skip
async def test_a_bad_body_is_refused_and_the_next_one_served(
    stack: Any, body: bytes, headers: dict[str, str], status: int, code: str | None
) -> None:
    sent = {"content-type": "application/json", **headers}
    response = await stack.client.post(CHAT, content=body, headers=sent)
    assert response.status_code == status
    assert code is None or response.json()["error"]["code"] == code
    assert (await stack.chat()).status_code == 200
    assert stack.gateway.admission.in_flight == 0


async def test_a_huge_body_of_unknown_length_is_refused(stack: Any) -> None:
    async def pieces() -> Any:
        for _ in range(160):
            yield b" " * 65_536

    response = await stack.client.post(CHAT, content=pieces())
    assert response.status_code == 413


async def test_a_prompt_beyond_the_context_names_the_numbers(stack: Any) -> None:
    long = "a b c d e f " * 500
    for changes in ({"messages": [{"role": "user", "content": long}]}, {"max_tokens": 5000}):
        response = await stack.chat(**changes)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
    assert stack.fleet.requests == []


async def test_a_body_that_never_comes_is_given_up(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, body_s=0.1) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{" % CHAT.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_full_gateway_says_when_to_come_back(run_stack: Any) -> None:
    go_on = asyncio.Event()

    async def script(fleet: Any, request: Any) -> None:
        await go_on.wait()
        fleet.say(request, fleet.ids("Hello"), end=EndReason.STOP)

    async with run_stack(script, max_in_flight=1) as stack:
        first = asyncio.create_task(stack.chat())
        await stack.until(lambda: stack.fleet.requests)
        refused = await stack.chat()
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        go_on.set()
        assert (await first).status_code == 200


async def test_a_drain_finishes_streams_and_takes_no_more(run_stack: Any) -> None:
    go_on = asyncio.Event()

    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("Hello"))
        await go_on.wait()
        fleet.say(request, fleet.ids(" world"), index=1, end=EndReason.STOP)

    async with run_stack(script) as stack:
        first = asyncio.create_task(stack.chat())
        await stack.until(lambda: stack.fleet.requests)
        stack.member.stopping.set()
        await stack.until(lambda: stack.gateway.admission.draining)
        refused = await stack.chat()
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        ready = await stack.client.get("/health/ready")
        assert ready.status_code == 503
        assert ready.json()["reasons"] == ["draining"]
        assert stack.member.vitals.readiness.ready is False
        go_on.set()
        assert (await first).json()["choices"][0]["message"]["content"] == "Hello world"


async def test_a_gateway_that_is_cut_off_leaves_no_open_port(run_stack: Any, hello: Any) -> None:
    """In a test that failed, its socket would make a later one fail."""
    held: list[Any] = []

    async def cut_off() -> None:
        async with run_stack(hello) as stack:
            server = stack.gateway.server
            held.extend([server, *await asyncio.open_connection("127.0.0.1", server.port)])
            await stack.until(server._connections)
            raise KeyError("a bug")

    with pytest.raises(ExceptionGroup):
        await cut_off()
    server, reader, writer = held
    assert server._socket.fileno() == -1
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_a_drain_lasts_as_long_as_it_may(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("Hello"))
        await asyncio.sleep(0.5)
        fleet.say(request, fleet.ids(" world"), index=1, end=EndReason.STOP)

    async with run_stack(script, drain_s=60.0) as stack:
        first = asyncio.create_task(stack.chat())
        await stack.until(lambda: stack.fleet.requests)
        stack.member.stopping.set()
        assert (await first).json()["choices"][0]["message"]["content"] == "Hello world"


async def test_a_drain_that_takes_too_long_ends_its_streams(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("Hello"))

    async with run_stack(script, drain_s=0.2) as stack:
        first = asyncio.create_task(stack.chat())
        await stack.until(lambda: stack.fleet.requests)
        stack.member.stopping.set()
        response = await first
        assert response.status_code == 503
        record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
        assert record.state == "cancelling"


async def test_health_and_metrics(stack: Any) -> None:
    await stack.chat()
    assert (await stack.client.get("/health/live")).status_code == 200
    assert (await stack.client.get("/health/ready")).json() == {"ok": True, "reasons": []}
    text = (await stack.client.get("/metrics")).text
    assert 'diptych_gateway_time_to_first_token_seconds_count{model="tiny"}' in text
    assert 'diptych_gateway_tokens_total{kind="answer",model="tiny"}' in text


async def test_a_model_whose_workers_left_is_unavailable_not_unknown(stack: Any) -> None:
    bucket = stack.fleet.bus.bucket(WORKERS, WorkerRegistration)
    await bucket.delete("decode-worker-00000000aaaa")
    await stack.until(lambda: not list(stack.gateway.models))
    response = await stack.chat()
    assert response.status_code == 503
    assert "retry-after" in response.headers


async def test_without_a_bus_a_request_is_refused_and_cancelled_later(stack: Any) -> None:
    stack.broker.go_away()
    response = await stack.chat()
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    ready = await stack.client.get("/health/ready")
    assert ready.json()["reasons"] == ["the bus is away"]
    stack.broker.come_back()
    bucket = stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
    found = await stack.until(lambda: bucket.get(response.headers["x-request-id"]))
    assert found.value.state is RecordState.CANCELLING
    assert (await stack.chat()).status_code == 200


async def test_one_of_several_on_a_port_leaves_it_before_it_refuses(run_stack: Any) -> None:
    go_on = asyncio.Event()

    async def script(fleet: Any, request: Any) -> None:
        fleet.say(request, fleet.ids("Hello"))
        await go_on.wait()
        fleet.say(request, fleet.ids(" world"), index=1, end=EndReason.STOP)

    async with run_stack(script, reuse_port=True) as stack:
        idle = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
        first = asyncio.create_task(stack.chat())
        await stack.until(lambda: stack.fleet.requests)
        stack.member.stopping.set()
        await stack.until(lambda: refuses(stack.base_url))
        idle[1].write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await idle[0].read()  # to the end: it is the connection's last
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
        idle[1].close()
        go_on.set()
        assert (await first).json()["choices"][0]["message"]["content"] == "Hello world"


async def refuses(base_url: str) -> bool:
    """Whether nobody takes new connections."""
    async with httpx.AsyncClient() as client:
        try:
            await client.get(f"{base_url}/models")
        except httpx.ConnectError:
            return True
    return False


async def test_two_share_a_port_and_a_stranger_does_not_get_it(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, reuse_port=True) as stack:
        port = stack.gateway.server.port
        limits = ConnectionLimits(max_connections=9, max_frame_bytes=1024, ping_s=20.0)
        address = {"host": "127.0.0.1", "port": port, "limits": limits}
        second = HttpServer(lambda: None, reuse_port=True, **address)
        second.bind()
        second.leave()
        with pytest.raises(Transient, match=f"cannot listen on 127.0.0.1:{port}"):
            HttpServer(lambda: None, **address).bind()

"""Floods of a real stack on the `sim` engine, for two cores: nothing hangs, nothing swells."""

import asyncio
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

IN_FLIGHT = 200
CHAT = "/v1/chat/completions"
STATUS_LINE = 12


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A stack that computes nothing, with a gateway that soon loses patience."""
    live = LiveStack(tmp_path_factory.mktemp("flooded"), engine="sim", patient=True)
    gateway = {
        "MAX_IN_FLIGHT": str(IN_FLIGHT),
        "SLOW_READER_S": "2",
        "FIRST_TOKEN_S": "60",
    }
    try:
        for service in ("prefill-worker", "decode-worker"):
            live.start(service, MAX_SEQUENCES="64", KV_TOKENS="400000", TRANSFER_SLOTS="1024")
        live.start("scheduler")
        live.start("gateway", **gateway)
        for process in live.processes:
            process.wait_ready()
        live.wait_for_model()
        yield live
    finally:
        live.close()


def body(max_tokens: int, **changes: Any) -> bytes:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(asked | changes).encode()


def post(max_tokens: int, *headers: str) -> bytes:
    sent = body(max_tokens)
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(sent)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent


def rss_mb(stack: LiveStack, service: str) -> float:
    tether = psutil.Process(stack.of(service).popen.pid)
    tree = [tether, *tether.children(recursive=True)]
    return max(process.memory_info().rss for process in tree) / 1e6


async def answered(stack: LiveStack) -> None:
    """An ordinary client is served."""
    async with httpx.AsyncClient(timeout=60) as client:
        url = f"http://127.0.0.1:{stack.port}{CHAT}"
        headers = {"content-type": "application/json"}
        answer = await client.post(url, content=body(4, stream=False), headers=headers)
        assert answer.status_code == 200, answer.text


async def settled(stack: LiveStack) -> None:
    """No worker holds anything."""
    async with httpx.AsyncClient(timeout=120) as client, asyncio.timeout(240):
        for service in ("prefill-worker", "decode-worker"):
            url = f"http://127.0.0.1:{stack.of(service).health_port}/metrics"
            while _held((await client.get(url)).text):
                await asyncio.sleep(0.05)


def _held(metrics: str) -> float:
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    lines = [line for line in metrics.splitlines() if line.startswith(names)]
    assert len(lines) == len(names)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_two_thousand_connections_that_all_ask_at_once(flooded: LiveStack) -> None:
    """Those there is room for are served; each other one hears at once when to come back."""
    await answered(flooded)
    before_mb = rss_mb(flooded, "gateway")
    outcomes: Counter[str] = Counter()
    waits: list[int] = []

    async def client(ask: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", flooded.port)
        await ask.wait()
        writer.write(post(8, "connection: close"))
        answer = (await reader.read()).decode()
        writer.close()
        status = answer[:STATUS_LINE].rpartition(" ")[2]
        whole = status != "200" or answer.rstrip().endswith(("data: [DONE]\n\n\r\n0", "0"))
        head, _, told = answer.partition("\r\n\r\n")
        code = "" if status == "200" else json.loads(told)["error"]["code"]
        outcomes[f"{status} {code}".strip() if whole else "cut"] += 1
        if code:
            head = head.lower()
            waits.append(int(head.partition("retry-after: ")[2].split("\r\n")[0]))

    ask = asyncio.Event()
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        for _ in range(2000):
            tasks.create_task(client(ask))
        await asyncio.sleep(3)
        ask.set()
    assert sum(outcomes.values()) == 2000
    log.info("%s, told to wait %s s", dict(outcomes), sorted(set(waits)))
    assert set(outcomes) <= {"200", "429 rate_limit_exceeded", "503 no_capacity"}, outcomes
    assert outcomes["200"] >= IN_FLIGHT / 2
    assert all(1 <= wait <= 120 for wait in waits)
    grown_mb = rss_mb(flooded, "gateway") - before_mb
    log.info("the gateway grew by %.0f MB", grown_mb)
    assert grown_mb < 150
    await settled(flooded)
    await answered(flooded)


async def test_readers_that_never_read_are_cut_off_and_may_come_back(flooded: LiveStack) -> None:
    """A thousand streams of 1,500 tokens each, five times what there is room for."""
    await answered(flooded)
    before_mb = peak_mb = rss_mb(flooded, "gateway")
    deaf: list[socket.socket] = []
    for _ in range(5):
        for _ in range(IN_FLIGHT):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", flooded.port))
            client.sendall(post(1500, "x-diptych-resume: 1"))
            deaf.append(client)
        await asyncio.sleep(1.0)
        peak_mb = max(peak_mb, rss_mb(flooded, "gateway"))
    await answered_again(flooded, timeout_s=240)
    peak_mb = max(peak_mb, rss_mb(flooded, "gateway"))
    log.info("the gateway grew by %.0f MB at most", peak_mb - before_mb)
    assert peak_mb - before_mb < 150
    await settled(flooded)
    await comes_back(flooded, deaf[0])
    for client in deaf:
        client.close()


async def comes_back(stack: LiveStack, deaf: socket.socket) -> None:
    """One that was cut off reads the rest of its answer."""
    seen = await asyncio.to_thread(rest_of, deaf)
    head, _, text = seen.partition("\r\n\r\n")
    assert "200 OK" in head
    assert "[DONE]" not in text, "it was cut off"
    request_id = head.partition("x-request-id: ")[2].split("\r\n")[0]
    *_, last_whole = [part for part in text.split("\n\n")[:-1] if f"id: {request_id}:" in part]
    last_id = last_whole.partition("id: ")[2].split("\n")[0]
    async with httpx.AsyncClient(timeout=60, base_url=stack.base_url) as client:
        path, params = f"/chat/completions/{request_id}", {"stream": "true"}
        rest = await client.get(path, params=params, headers={"last-event-id": last_id})
        assert rest.status_code == 200, rest.text
        assert rest.text.endswith("data: [DONE]\n\n")
        whole = (await client.get(path)).json()["choices"][0]["message"]["content"]
    until = text[: text.index(last_whole) + len(last_whole)]
    assert said(until) + said(rest.text) == whole


def rest_of(client: socket.socket) -> str:
    """What the kernel still holds for a client, up to its connection's end."""
    client.settimeout(120)
    data = b""
    try:
        while part := client.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data.decode("utf-8", "replace")


def said(events: str) -> str:
    """The text of chat events, with or without the framing of chunks around them."""
    lines = [line for line in events.split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def test_a_full_jetstream_is_told_at_once_and_forgotten_when_there_is_room(
    flooded: LiveStack,
) -> None:
    await answered(flooded)
    for stream in ("REQUESTS", "KV_responses"):
        path, sent = CHAT, body(4, stream=False)
        if stream == "KV_responses":
            path, sent = "/v1/responses", json.dumps({"model": MODEL, "input": "Hello"}).encode()
        before = await limit(flooded, stream, 1)
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"http://127.0.0.1:{flooded.port}{path}"
            headers = {"content-type": "application/json"}
            began_s = time.monotonic()
            answer = await client.post(url, content=sent, headers=headers)
            log.info("%s full: told after %.0f ms", stream, (time.monotonic() - began_s) * 1000)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "storage_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 120
            await limit(flooded, stream, before)
            assert (await client.post(url, content=sent, headers=headers)).status_code == 200


async def limit(stack: LiveStack, stream: str, max_bytes: int) -> int:
    """Give a stream another limit; gives the one it had."""
    client = await stack.client()
    try:
        told = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=60)
        config = json.loads(told.data)["config"]
        wanted = json.dumps(config | {"max_bytes": max_bytes}).encode()
        done = await client.request(f"$JS.API.STREAM.UPDATE.{stream}", wanted, timeout=60)
        assert "error" not in json.loads(done.data), done.data
        return int(config["max_bytes"])
    finally:
        await client.close()


async def answered_again(stack: LiveStack, timeout_s: float) -> None:
    """Ask until there is a place, as a client does that heeds `Retry-After`."""
    async with httpx.AsyncClient(timeout=60) as client, asyncio.timeout(timeout_s):
        url = f"http://127.0.0.1:{stack.port}{CHAT}"
        headers = {"content-type": "application/json"}
        while True:
            sent = body(4, stream=False)
            answer = await client.post(url, content=sent, headers=headers)
            if answer.status_code == 200:
                return
            assert answer.status_code in (429, 503), answer.text
            await asyncio.sleep(min(2, int(answer.headers["retry-after"])))

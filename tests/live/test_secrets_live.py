"""Marked secrets through every door of a real stack, with debug logs, spans exported, a worker that
is killed, one that aborts and one that fails as Python does: a grep over all that is left finds
none.
"""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.markers import MARKER
from diptych_testkit.mortal_worker import ALOUD, AT_ONCE, MODULE

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

IDLE = b"\ndiptych_scheduler_owned_requests 0.0\n"
CHAT, RESPONSES = "/chat/completions", "/responses"
SCHEMA = {"type": "object", "properties": {MARKER: {"type": "string", "description": MARKER}}}
TOOL = {"name": f"f_{MARKER}", "description": MARKER, "parameters": SCHEMA}
CALL = {"name": TOOL["name"], "arguments": json.dumps({MARKER: MARKER})}


class Collector(ThreadingHTTPServer):
    """Keeps what is exported, byte by byte."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.got: list[bytes] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.got.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        return


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.shutdown()
    made.server_close()


def bodies() -> list[tuple[str, Any]]:
    said = {"role": "user", "content": f"Say {MARKER}."}
    called = {"role": "assistant", "tool_calls": [{"id": "c1", "function": CALL}]}
    result = {"role": "tool", "tool_call_id": "c1", "content": MARKER}
    some: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
    tools = [{"type": "function", "function": TOOL}]
    wanted = {"type": "json_schema", "json_schema": {"name": MARKER, "schema": SCHEMA}}
    labels = {"user": MARKER, "metadata": {MARKER: MARKER}, "safety_identifier": MARKER}
    return [
        (CHAT, {**some, "messages": [said, called, result], "tools": tools, "stop": MARKER}),
        (CHAT, {**some, "messages": [said], **labels, "stream": True}),
        (CHAT, {**some, "messages": [said], "response_format": wanted}),
        (CHAT, {**some, "messages": [said], "diptych": {"mode": "remote"}}),
        (RESPONSES, {"model": MODEL, "input": MARKER, "instructions": MARKER,
                     "max_output_tokens": 4, "metadata": {MARKER: MARKER}}),
        (RESPONSES, {"model": MODEL, "input": MARKER, "background": True, "max_output_tokens": 4}),
        ("/completions", {**some, "prompt": MARKER, "user": MARKER}),
        ("/embeddings", {"model": MODEL, "input": [MARKER], "user": MARKER}),
        ("/../tokenize", {"model": MODEL, "prompt": MARKER}),
        # Refused, each at another place.
        (CHAT, {**some, "messages": [{"role": MARKER, "content": MARKER}]}),
        (CHAT, {**some, "messages": [said], MARKER: MARKER}),
        (CHAT, {**some, "messages": [said], "model": MARKER}),
        (CHAT, {**some, "messages": [said], "tools": [{"type": MARKER}]}),
        (CHAT, {**some, "messages": [said], "max_tokens": MARKER}),
        (CHAT, {**some, "messages": [said], "response_format": {"type": MARKER}}),
        (RESPONSES, {"model": MODEL, "input": "x", "previous_response_id": MARKER}),
        ("/batches", {"input_file_id": MARKER, "endpoint": MARKER, "completion_window": "24h"}),
    ]  # fmt: skip


def ask(url: str, body: bytes | None, headers: dict[str, str], method: str = "POST") -> int:
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as err:
        err.read()
        return err.code


class Asking:
    """A client that writes its secrets everywhere."""

    def __init__(self, live: LiveStack, key: str) -> None:
        self.live, self.key = live, key
        self.statuses: list[int] = []

    def headers(self, key: str, **more: str) -> dict[str, str]:
        return {
            "authorization": f"Bearer {key}",
            "content-type": "application/json",
            "baggage": f"a={MARKER};{MARKER}",
            "tracestate": f"v={MARKER}",
            "user-agent": MARKER,
            "x-a": MARKER,
            **more,
        }

    def everything(self, first: int = 99) -> None:
        root = self.live.base_url
        for number, (path, body) in enumerate(bodies()[:first]):
            once = {"Idempotency-Key": f"{MARKER}-{number}"} if path in (CHAT, RESPONSES) else {}
            url = f"{root}{path}?{MARKER}={MARKER}".replace("/v1/..", "")
            wrong = (f"dk-{MARKER}", MARKER) if number < 2 else ()
            for key in (self.key, *wrong):
                sent = json.dumps(body).encode()
                self.statuses.append(ask(url, sent, self.headers(key, **once)))
        broken = f'{{"model": "{MARKER}'.encode()
        self.statuses.append(ask(root + CHAT, broken, self.headers(self.key)))
        for path in (f"/models/{MARKER}", f"/{MARKER}", f"/responses/{MARKER}", f"/files/{MARKER}"):
            self.statuses.append(ask(root + path, None, self.headers(self.key), "GET"))
        self.statuses.append(self._upload())

    def _upload(self) -> int:
        line = json.dumps({"custom_id": MARKER, "method": "POST", "url": "/v1/chat/completions",
                           "body": bodies()[0][1]})  # fmt: skip
        form = (
            f'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--b\r\ncontent-disposition: form-data; name="file"; filename="{MARKER}"\r\n\r\n'
            f"{line}\r\n--b--\r\n"
        )
        headers = self.headers(self.key) | {"content-type": "multipart/form-data; boundary=b"}
        request = urllib.request.Request(
            f"{self.live.base_url}/files", data=form.encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            file_id = json.load(answer)["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions",
                "completion_window": "24h", "metadata": {MARKER: MARKER}}  # fmt: skip
        sent = json.dumps(body).encode()
        return ask(f"{self.live.base_url}/batches", sent, self.headers(self.key))

    async def sockets(self) -> None:
        url = self.live.base_url.replace("http", "ws")
        offers = ["diptych", f"diptych-api-key.{self.key}"]
        frame = {"type": "response.create", "model": MODEL, "input": MARKER, "max_output_tokens": 4}
        for path, sent in ((RESPONSES, frame), (CHAT, bodies()[1][1])):
            async with connect(f"{url}{path}?{MARKER}", subprotocols=offers) as socket:
                for text in (json.dumps(sent), MARKER, f'{{"type": "{MARKER}"}}'):
                    await socket.send(text)
                async with asyncio.timeout(60):
                    for _ in range(4):
                        await socket.recv()
        with pytest.raises(WebSocketException):
            await connect(url + CHAT, subprotocols=["diptych", f"diptych-api-key.{MARKER}"])


def diptych(live: LiveStack, *arguments: str) -> Any:
    command = (sys.executable, "-m", "diptych_cli", *arguments, *live.where)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until(holds: Any, timeout_s: float = 120.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.1)


def crash(live: LiveStack, asking: Asking, word: str) -> str:
    """Have a worker die of `word`; gives its last words.

    The client leaves then, or the next worker would be given the same request.
    """
    dying = [p for p in live.processes if p.service == "decode-worker" and p.popen.poll() is None]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{MARKER} {word}"}],
        "max_tokens": 4,
        "diptych": {"mode": "local"},
    }
    sent = json.dumps(body).encode()
    fields = {**asking.headers(asking.key), "host": "x", "content-length": str(len(sent))}
    head = [f"POST /v1{CHAT} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as client:
        client.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + sent)
        until(lambda: any(process.popen.poll() is not None for process in dying))
    until(lambda: IDLE in live.of("scheduler").page("/metrics"))
    return next(p.last_words() for p in dying if p.popen.poll() is not None)


def left_behind(live: LiveStack, collector: Collector, pages: list[bytes]) -> dict[str, bytes]:
    """All that a stack leaves for others to read, but for what the bus stores."""
    files = {
        str(path): path.read_bytes()
        for path in live.folder.rglob("*")
        if path.is_file() and not path.is_relative_to(live.nats.store / "jetstream")
    }
    spans = {f"span batch {n}": data for n, data in enumerate(collector.got)}
    return files | spans | {f"metrics {n}": page for n, page in enumerate(pages)}


SERVICES = ("prefill-worker", "decode-worker", "scheduler", "power-governor", "gateway")


def start(live: LiveStack) -> None:
    for service in SERVICES:
        live.start(service)
    for process in live.processes:
        process.wait_ready()
    live.wait_for_model()


def test_a_grep_over_all_that_is_left_finds_no_secret(collector: Collector, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    live = LiveStack(tmp_path, patient=True, OTLP_ENDPOINT=endpoint, LOG_LEVEL="debug")
    try:
        start(live)
        key = diptych(live, "keys", "create", "--json", "--tenant", "acme")["key"]
        asking = Asking(live, key)
        until(lambda: ask(f"{live.base_url}/models", None, asking.headers(key), "GET") == 200)
        asking.everything()
        asyncio.run(asking.sockets())
        assert {200, 400, 401, 404} <= set(asking.statuses), asking.statuses
        assert 500 not in asking.statuses
        live.of("decode-worker").kill()
        live.start("decode-worker").wait_ready()
        asking.everything(first=2)
        pages = [process.page("/metrics") for process in live.processes]
        assert sum(map(bool, pages)) >= 5
    finally:
        live.close()
    hold(left_behind(live, collector, pages), key)
    assert collector.got


def test_a_worker_that_crashes_tells_where_and_not_what(
    collector: Collector, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    told = {"OTLP_ENDPOINT": endpoint, "LOG_LEVEL": "debug"}
    live = LiveStack(tmp_path, engine="sim", patient=True, **told)
    try:
        for _ in range(2):
            live.start("decode-worker", module=MODULE)
        for service in ("scheduler", "gateway"):
            live.start(service)
        for process in live.processes:
            process.wait_ready()
        live.wait_for_model()
        asking = Asking(live, "")
        words = crash(live, asking, ALOUD)
        assert "KeyError" in words
        assert "mortal_worker.py" in words
        live.start("decode-worker", module=MODULE).wait_ready()
        crash(live, asking, AT_ONCE)
        pages = [process.page("/metrics") for process in live.processes]
    finally:
        live.close()
    left = left_behind(live, collector, pages)
    hold(left, ALOUD)
    assert not [name for name in left if Path(name).name.startswith("core")]


def hold(left: dict[str, bytes], *secrets: str) -> None:
    for name, data in left.items():
        for secret in (MARKER, *secrets):
            place = data.find(secret.encode())
            assert place < 0, (name, data[max(0, place - 300) : place + 100])

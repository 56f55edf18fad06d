"""A model's name out of a path, a body or a frame is looked up, and made into nothing else."""

import asyncio
import json
from typing import Any

import pytest
from websockets.asyncio.client import connect

CHAT = "/v1/chat/completions"
NAMES = [
    "../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "tiny/../tiny",
    "./tiny",
    "tiny\x00",
    "tiny\n",
    "tiny.>",
    "*",
    ">",
    "$KV.keys.>",
    "$JS.API.STREAM.DELETE.REQUESTS",
    "TINY",
    "tiny ",
    "file:///etc/passwd",
    "http://127.0.0.1/",
    "\\\\host\\share",
    "{{ 7 * 7 }}",
    "%(x)s",
    "x" * 10_000,
    "\u202egnp.tiny",
]


def is_refused(status: int, error: dict[str, Any]) -> None:
    assert status in (400, 404), error
    assert error["type"] == "invalid_request_error"
    assert "49" not in error["message"]
    assert "root:" not in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("name", NAMES)
async def test_a_hostile_name_of_a_model_is_unknown_at_every_door(stack: Any, name: str) -> None:
    said = [{"role": "user", "content": "Hello"}]
    for path, body in (
        (CHAT, {"messages": said}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/embeddings", {"input": "Hello"}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = await stack.client.post(path, json={"model": name, **body})
        is_refused(answer.status_code, answer.json()["error"])
    url = f"ws://127.0.0.1:{stack.client.base_url.port}/v1/responses"
    async with connect(url) as socket:
        frame = {"type": "response.create", "model": name, "input": "Hello"}
        await socket.send(json.dumps(frame))
        told = json.loads(await socket.recv())
        is_refused(told["status"], told["error"])
    assert stack.fleet.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/%00",
        "/v1/models/tiny%2f..",
        "/v1/models//etc/passwd",
        "/v1/files/..%2f..%2fetc%2fpasswd",
        "/v1/files/file-../content",
        "/v1/files/$KV.keys/content",
        "/v1/responses/..%2fkeys",
        "/v1/batches/..%2f..",
        "/docs/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
    ],
)
async def test_a_hostile_path_is_unknown(stack: Any, path: str) -> None:
    host, port = "127.0.0.1", stack.client.base_url.port
    reader, writer = await asyncio.open_connection(host, port)  # a client would tidy the path
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    writer.write(request.encode())
    async with asyncio.timeout(10):
        answer = (await reader.read()).decode(errors="replace")
    writer.close()
    assert answer.split()[1] in ("400", "404"), answer[:300]
    assert "root:" not in answer

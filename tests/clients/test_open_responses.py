"""Every event and object of the Responses API, from the real stack, by the schema of its makers."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.open_responses import check_conformity

pytestmark = pytest.mark.clients

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a helpful assistant.",
    "input": "What is the capital of France?",
    "temperature": 0,
    "metadata": {"a": "b"},
}
TOOL = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}
KINDS: dict[str, dict[str, Any]] = {
    "completed": {},
    "incomplete": {"max_output_tokens": 3},
    "logprobs": {"max_output_tokens": 3, "top_logprobs": 2},
    "tool": {"tools": [TOOL], "tool_choice": "required"},
    "structured": {"text": {"format": FORMAT}},
}


@pytest.fixture
def http(stack: LiveStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.base_url, timeout=240) as made:
        yield made


def events(http: httpx.Client, **asked: Any) -> Iterator[dict[str, Any]]:
    """Each event of a stream, judged."""
    with http.stream("POST", "/responses", json={**asked, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                check_conformity(event)
                yield event


def judged(answer: httpx.Response) -> dict[str, Any]:
    """A response object."""
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    check_conformity(found)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_whole_streamed_retrieved_and_over_a_websocket(
    http: httpx.Client, stack: LiveStack, kind: str
) -> None:
    asked = ASKED | KINDS[kind]
    judged(http.post("/responses", json=asked))
    streamed = list(events(http, **asked))
    last = streamed[-1]["response"]
    assert judged(http.get(f"/responses/{last['id']}"))["output"] == last["output"]
    with connect(f"ws://127.0.0.1:{stack.port}/v1/responses") as socket:
        socket.send(json.dumps({"type": "response.create", **asked}))
        over_socket = [json.loads(socket.recv(timeout=240))]
        while over_socket[-1]["type"] != streamed[-1]["type"]:
            over_socket.append(json.loads(socket.recv(timeout=240)))
        socket.send(json.dumps({"type": "response.create", **asked, "nonsense": 1}))
        over_socket.append(json.loads(socket.recv(timeout=240)))
    for event in over_socket:
        check_conformity(event)
    assert [e["type"] for e in over_socket] == [*(e["type"] for e in streamed), "error"]


def test_in_progress_and_cancelled(http: httpx.Client) -> None:
    running = judged(http.post("/responses", json=ASKED | {"background": True, "ignore_eos": True}))
    assert running["status"] in ("queued", "in_progress")
    assert judged(http.get(f"/responses/{running['id']}"))["status"] == "in_progress"
    assert judged(http.post(f"/responses/{running['id']}/cancel"))["status"] == "cancelled"
    assert judged(http.get(f"/responses/{running['id']}"))["status"] == "cancelled"


def test_failed(one_more_gateway: Callable[..., Any]) -> None:
    gateway = one_more_gateway(TOTAL_S="4")
    with httpx.Client(base_url=f"{gateway.url}/v1", timeout=240) as http:
        seen = list(events(http, **ASKED, ignore_eos=True))
        assert seen[-1]["type"] == "response.failed"
        assert judged(http.get(f"/responses/{seen[-1]['response']['id']}"))["status"] == "failed"

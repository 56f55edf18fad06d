"""`openai-agents`, over server-sent events and over a WebSocket."""

import json
from pathlib import Path

import pytest

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.outside_clients import OutsideClients

pytestmark = pytest.mark.clients

ANSWER = "The capital of France is Paris."


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_agents_talk_turn_after_turn(
    outside: OutsideClients, stack: LiveStack, tmp_path: Path, transport: str
) -> None:
    printed = outside.run_python(
        "agent_talk.py",
        tmp_path,
        DIPTYCH_URL=stack.base_url,
        DIPTYCH_MODEL=MODEL,
        TRANSPORT=transport,
    )
    first, second, streamed, last = map(json.loads, printed.splitlines())
    assert first["text"] == streamed["text"] == ANSWER
    assert second["input_tokens"] > first["input_tokens"], "by its previous_response_id"
    assert last["input_tokens"] == second["input_tokens"], "its session sends the same turns"
    assert last["text"] == second["text"]
    assert first["response_id"].startswith("resp_")


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_agents_call_a_tool_and_go_on(
    outside: OutsideClients, stack: LiveStack, tmp_path: Path, transport: str
) -> None:
    printed = outside.run_python(
        "agent_tools.py",
        tmp_path,
        DIPTYCH_URL=stack.base_url,
        DIPTYCH_MODEL=MODEL,
        TRANSPORT=transport,
    )
    whole, streamed = map(json.loads, printed.splitlines())
    assert whole == streamed
    assert whole["items"][:2] == ["tool_call_item", "tool_call_output_item"]
    assert whole["items"][-1] == "message_output_item"
    assert whole["called"][0].split()[0] in ("Paris", "Rome")
    assert whole["text"]

"""The stock client on input items and embeddings, and chat over a plain WebSocket."""

import json
from typing import Any

import openai
import openresponses_types
import pytest
from websockets.sync.client import connect

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = pytest.mark.clients

FRANCE: Any = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]


def test_input_items_are_listed_page_by_page(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=FRANCE, max_output_tokens=1)
    pages = client.responses.input_items.list(made.id, order="asc", limit=1)
    items: list[Any] = list(pages)
    assert [item.role for item in items] == ["system", "user"]
    assert items[1].content[0].text == FRANCE[1]["content"]
    for item in items:
        openresponses_types.Message.model_validate_json(item.model_dump_json(), strict=True)


def test_chat_over_a_websocket(client: openai.OpenAI, stack: LiveStack) -> None:
    asked = {"model": MODEL, "messages": FRANCE, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    said = ""
    with connect(f"ws://127.0.0.1:{stack.port}/v1/chat/completions") as socket:
        socket.send(json.dumps(asked))
        while True:
            chunk = json.loads(socket.recv(timeout=240))
            (choice,) = chunk["choices"]
            said += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                break
    assert said == whole.choices[0].message.content

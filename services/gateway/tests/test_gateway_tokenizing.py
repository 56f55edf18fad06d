"""`/tokenize`, `/detokenize` and `/v1/embeddings`."""

import threading
from typing import Any

import pytest

from diptych_gateway.texts import tokenizing
from diptych_text.codec import TextCodec

SAID = [{"role": "user", "content": "Hello world"}]


async def post(stack: Any, path: str, **body: Any) -> Any:
    return await stack.client.post(path, json={"model": "tiny", **body})


async def test_a_prompt_and_back(stack: Any) -> None:
    codec: TextCodec = stack.fleet.codec
    text = "Hello world, hello"
    found = (await post(stack, "/tokenize", prompt=text)).json()
    ids = codec.encode(text)
    assert found == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}
    assert (await post(stack, "/detokenize", tokens=ids)).json()["prompt"].endswith(text)
    plain = (await post(stack, "/tokenize", prompt=text, add_special_tokens=False)).json()
    assert plain["tokens"] == codec.encode(text, add_bos=False)
    assert (await post(stack, "/detokenize", tokens=plain["tokens"])).json() == {"prompt": text}


async def test_messages_are_tokenized_as_chat_does(stack: Any) -> None:
    codec: TextCodec = stack.fleet.codec
    found = (await post(stack, "/tokenize", messages=SAID, return_token_strs=True)).json()
    assert found["tokens"] == codec.encode_chat(SAID)
    assert found["token_strs"] == [codec.control_text(token) for token in found["tokens"]]
    await stack.chat(messages=SAID)
    assert list(stack.fleet.requests[0].prompt_ids) == found["tokens"]
    short = (await post(stack, "/tokenize", messages=SAID, add_generation_prompt=False)).json()
    assert short["tokens"] == codec.encode_chat(SAID, add_generation_prompt=False)
    written = (await post(stack, "/detokenize", tokens=found["tokens"])).json()["prompt"]
    assert written == codec.render(SAID)


async def test_a_long_text_leaves_the_event_loop_and_gives_the_same(
    stack: Any, monkeypatch: Any
) -> None:
    threads: set[threading.Thread] = set()
    parts = TextCodec.text_parts

    def watched(self: TextCodec, text: str, **options: Any) -> Any:
        for part in parts(self, text, **options):
            threads.add(threading.current_thread())
            yield part

    monkeypatch.setattr(TextCodec, "text_parts", watched)
    text = "hello world and so on " * 8000
    found = (await post(stack, "/tokenize", prompt=text)).json()
    assert found["tokens"] == stack.fleet.codec.encode(text)
    assert threads
    assert threading.main_thread() not in threads
    back = (await post(stack, "/detokenize", tokens=found["tokens"][1:])).json()["prompt"]
    assert text.endswith(back)


async def test_the_only_model_need_not_be_named(stack: Any) -> None:
    response = await stack.client.post("/tokenize", json={"prompt": "Hello"})
    assert response.status_code == 200
    response = await stack.client.post("/detokenize", json={"tokens": []})
    assert response.json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": SAID}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": SAID, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": 7}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "mood": 1}, 400, "mood"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model"),
        ("/tokenize", {"prompt": "ab" * 600_000}, 400, "prompt"),
        ("/detokenize", {"tokens": [0, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [0] * 262_145}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/v1/embeddings", {"input": "a"}, 400, "model"),
        ("/v1/embeddings", {"input": "a", "model": "nope"}, 404, "model"),
        ("/v1/embeddings", {"input": "a", "mood": 1}, 400, "mood"),
    ],
)
async def test_what_is_wrong_is_named(
    stack: Any, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = await post(stack, path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert stack.gateway.admission.in_flight == 0


async def test_more_tokens_than_anybody_needs_are_refused(stack: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizing, "MAX_TOKENS", 1000)
    response = await post(stack, "/tokenize", prompt="hello world " * 5000)
    assert response.status_code == 400
    assert "at most 1000 tokens" in response.json()["error"]["message"]


async def test_no_model_gives_embeddings(stack: Any) -> None:
    response = await post(stack, "/v1/embeddings", input="Hello")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported")
    assert "'tiny'" in error["message"]

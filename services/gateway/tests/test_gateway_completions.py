"""`POST /v1/completions`: prompts as they are, in the older form."""

import json
from typing import Any

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_gateway.completions.text_checks import (
    MAX_PROMPTS,
    CompletionCall,
    check_completion,
    decode_completion,
)
from diptych_testkit.tiny_gguf import EOS_ID, tiny_card
from diptych_text.codec import TextCodec

CODEC = TextCodec.from_card(tiny_card())
PATH = "/v1/completions"


def call(**changes: Any) -> CompletionCall:
    return check_completion(
        decode_completion(json.dumps({"model": "tiny", "prompt": "Hi", **changes}).encode())
    )


BAD_VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": 7}, "prompt", "invalid_type"),
    ({"prompt": {"text": "Hi"}}, "prompt", "invalid_type"),
    ({"prompt": []}, "prompt", ""),
    ({"prompt": [[]]}, "prompt[0]", ""),
    ({"prompt": ["Hi", 7]}, "prompt[1]", "invalid_type"),
    ({"prompt": [7, "Hi"]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    ({"prompt": [[1], ["a"]]}, "prompt[1][0]", "invalid_type"),
    ({"prompt": [-1]}, "prompt", ""),
    ({"prompt": [2**32]}, "prompt", ""),
    ({"prompt": [[1], [5, -3]]}, "prompt[1]", ""),
    ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", ""),
    ({"prompt": ["a"] * MAX_PROMPTS, "n": 3}, "n", ""),
    ({"n": 0}, "n", ""),
    ({"n": 9}, "n", ""),
    ({"logprobs": 6}, "logprobs", ""),
    ({"logprobs": -1}, "logprobs", ""),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"echo": True, "logprobs": 0}, "echo", "unsupported_parameter"),
    ({"suffix": "the end"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"max_tokens": 0}, "max_tokens", ""),
    ({"stop": list("abcde")}, "stop", ""),
    ({"logit_bias": {"x": 1}}, "logit_bias", ""),
    ({"stream_options": {"include_usage": True}}, "stream_options", ""),
    ({"messages": []}, "messages", "unknown_parameter"),
    ({"temperature": 3}, "temperature", ""),
]


@pytest.mark.parametrize(("changes", "param", "code"), BAD_VALUES, ids=repr)
def test_a_bad_value_is_refused_by_name(changes: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call(**changes)
    assert (caught.value.param, caught.value.code or "") == (param, code)
    assert len(str(caught.value)) < 400


def test_defaults_are_openais() -> None:
    made = call()
    assert (made.max_tokens, made.choices, made.echo, made.stream) == (16, 1, False, False)
    assert made.sampling.top_logprobs is None
    assert call(suffix="", best_of=1, logprobs=None).prompts == made.prompts


def test_prompts_come_in_four_forms() -> None:
    assert [p.text for p in call(prompt="a").prompts] == ["a"]
    assert [p.text for p in call(prompt=["a", "b"]).prompts] == ["a", "b"]
    (ids,) = call(prompt=[3, 1, 2]).prompts
    assert (list(ids.ids or ()), ids.highest) == ([3, 1, 2], 3)
    assert [list(p.ids or ()) for p in call(prompt=[[3], [1, 2]]).prompts] == [[3], [1, 2]]


async def backwards(fleet: Any, request: Request) -> None:
    """Says the prompt's last three tokens, last first; with logprobs if asked for."""
    token_ids = list(request.prompt_ids[:-4:-1])
    top = request.sampling.top_logprobs
    told = (
        ()
        if top is None
        else tuple(((t, -0.5), (t, -0.5), (EOS_ID, -3.0))[: 1 + top] for t in token_ids)
    )
    fleet.say(request, token_ids, end=EndReason.LENGTH, logprobs=told)


async def post(stack: Any, **changes: Any) -> Any:
    body = {"model": "tiny", "prompt": "Hello world", **changes}
    return await stack.client.post(PATH, json=body)


def said(prompt: str) -> str:
    token_ids = CODEC.encode(prompt)
    return b"".join(map(CODEC.token_bytes, token_ids[:-4:-1])).decode("utf-8", "replace")


def said_tokens(prompt: str) -> int:
    return min(3, len(CODEC.encode(prompt)))


async def test_a_text_is_the_prompt_as_it_stands(run_stack: Any) -> None:
    async with run_stack(backwards) as stack:
        answer = (await post(stack, temperature=0)).json()
        (request,) = stack.fleet.requests
    assert list(request.prompt_ids) == CODEC.encode("Hello world"), "no template around it"
    assert request.stopping.max_tokens == 16
    assert answer["object"] == "text_completion"
    assert answer["id"] == f"cmpl-{request.request_id}"
    assert answer["choices"] == [
        {"text": said("Hello world"), "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_ids)


async def test_control_tokens_in_a_prompt_count(run_stack: Any) -> None:
    """A completion's prompt is all the client's: templates are written out in it."""
    text = f"Hello{CODEC.control_text(EOS_ID)}world"
    async with run_stack(backwards) as stack:
        assert (await post(stack, prompt=text)).status_code == 200
        assert EOS_ID in stack.fleet.requests[0].prompt_ids


async def test_token_ids_are_taken_as_they_are_and_must_exist(run_stack: Any) -> None:
    token_ids, vocab = CODEC.encode("grüße, world", add_bos=False), tiny_card().vocab_size
    async with run_stack(backwards) as stack:
        assert (await post(stack, prompt=token_ids)).status_code == 200
        assert list(stack.fleet.requests[0].prompt_ids) == token_ids
        bad = await post(stack, prompt=[[1, 2], [3, vocab]])
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt")
        assert f"below {vocab}, saw {vocab}" in bad.json()["error"]["message"]
        long = await post(stack, prompt=[1] * 3000)
        assert long.json()["error"]["code"] == "context_length_exceeded"
        assert "3016 were asked for: 3000 in the prompt" in long.json()["error"]["message"]
        assert len(stack.fleet.requests) == 1


async def test_many_prompts_have_n_choices_each_in_order(run_stack: Any) -> None:
    prompts = ["Hello world", "the end of it"]
    async with run_stack(backwards) as stack:
        answer = (await post(stack, prompt=prompts, n=2, echo=True, seed=3)).json()
        requests = stack.fleet.requests
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    texts = [prompt + said(prompt) for prompt in prompts for _ in range(2)]
    assert [c["text"] for c in answer["choices"]] == texts
    assert [r.sampling.seed for r in requests] == [3, 4, 3, 4]
    read = sum(len(CODEC.encode(prompt)) for prompt in prompts)
    assert answer["usage"]["prompt_tokens"] == read, "each prompt is counted once"
    assert answer["usage"]["completion_tokens"] == 2 * sum(map(said_tokens, prompts))


async def test_echo_spells_token_ids(run_stack: Any) -> None:
    token_ids = CODEC.encode("grüße, world", add_bos=False)
    async with run_stack(backwards) as stack:
        answer = (await post(stack, prompt=token_ids, echo=True)).json()
    assert answer["choices"][0]["text"].startswith("grüße, world")


async def test_logprobs_are_lists_side_by_side(run_stack: Any) -> None:
    async with run_stack(backwards) as stack:
        answer = (await post(stack, logprobs=2)).json()
        alone = (await post(stack, logprobs=0)).json()
    token_ids = CODEC.encode("Hello world")[:-4:-1]
    texts = [CODEC.token_bytes(t).decode() or CODEC.control_text(t) for t in token_ids]
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == texts
    assert found["token_logprobs"] == [-0.5] * len(texts)
    eos = CODEC.control_text(EOS_ID)
    assert found["top_logprobs"] == [{text: -0.5, eos: -3.0} for text in texts]
    lengths = [len(CODEC.token_bytes(t)) for t in token_ids]
    assert found["text_offset"] == [sum(lengths[:n]) for n in range(len(texts))]
    assert alone["choices"][0]["logprobs"]["top_logprobs"] == [{text: -0.5} for text in texts]


def parsed(text: str) -> list[tuple[str | None, Any]]:
    events = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line)
        data = fields["data"]
        events.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events


async def test_a_stream_echoes_first_and_ends_with_its_usage(run_stack: Any) -> None:
    options = {"include_usage": True}
    async with run_stack(backwards) as stack:
        answer = await post(stack, stream=True, echo=True, stream_options=options)
        rid = stack.fleet.requests[0].request_id
    *events, done = parsed(answer.text)
    assert done == (None, "[DONE]")
    assert events[0] == (f"{rid}:-1", events[0][1])
    chunks = [data for _, data in events]
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert {c["id"] for c in chunks} == {f"cmpl-{rid}"}
    texts = [c["choices"][0]["text"] for c in chunks[:-1]]
    assert texts[0] == "Hello world"
    assert "".join(texts) == "Hello world" + said("Hello world")
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 2)


async def test_a_stream_of_many_prompts_is_told_by_index(run_stack: Any) -> None:
    prompts = ["Hello world", "the end of it", "grüße"]
    async with run_stack(backwards) as stack:
        answer = await post(stack, prompt=prompts, stream=True, logprobs=1)
    events = parsed(answer.text)
    assert {number for number, _ in events} == {None}
    choices = [data["choices"][0] for _, data in events[:-1]]
    for number, prompt in enumerate(prompts):
        own = [c for c in choices if c["index"] == number]
        assert "".join(c["text"] for c in own) == said(prompt)
        assert sum(len(c["logprobs"]["tokens"]) for c in own if c["logprobs"]) == (
            said_tokens(prompt)
        )


async def test_a_stream_goes_on_after_an_event(run_stack: Any) -> None:
    async with run_stack(backwards) as stack:
        body = {"model": "tiny", "prompt": "Hello world", "stream": True, "logprobs": 1}
        header = {"x-diptych-resume": "1"}
        events = (await stack.client.post(PATH, json=body, headers=header)).text.split("\n\n")
        (request,) = stack.fleet.requests
        record = RequestRecord(
            request_id=request.request_id,
            owner="s1",  # type: ignore[arg-type]
            gateway=request.gateway,
            state=RecordState.CLOSED,
            request_seq=1,
            head=request.head,
        )
        bucket = stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        await bucket.put(request.request_id, record)
        last_seen = {"last-event-id": events[0].split("\n")[0].removeprefix("id: ")}
        again = await stack.client.post(PATH, json=body, headers=last_seen)
    assert again.text.split("\n\n") == events[1:]

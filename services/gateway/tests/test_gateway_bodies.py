"""Every bad input has an answer that names the parameter, what was expected and what was seen."""

import json
from typing import Any

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.requests import Mode, PriorityClass
from diptych_gateway.judging.bodies import decode
from diptych_gateway.judging.checking import MAX_STOP_CHARS, ChatCall, check
from diptych_gateway.judging.harmless import HARMLESS


def call(**changes: Any) -> ChatCall:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **changes}
    return check(decode(json.dumps(body).encode()))


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


MISSING = "missing_required_parameter"
BAD_VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 7}, "model", "invalid_type"),
    ({"model": ""}, "model", ""),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", ""),
    ({"repetition_penalty": 0.009}, "repetition_penalty", ""),
    ({"max_tokens": 10**300}, "max_tokens", ""),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens", ""),
    ({"metadata": {str(i): "a" for i in range(17)}}, "metadata", ""),
    ({"metadata": {"a": "b" * 513}}, "metadata", ""),
    ({"messages": "Hi"}, "messages", "invalid_type"),
    ({"messages": []}, "messages", ""),
    ({"messages": ["Hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role", ""),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].tool_call_id", MISSING),
    ({"messages": [{"role": "function", "content": "Hi"}]}, "messages[0].role", ""),
    ({"messages": [{"role": "user"}]}, "messages[0].content", ""),
    ({"messages": said(None)}, "messages[0].content", ""),
    ({"messages": said(3)}, "messages[0].content", "invalid_type"),
    ({"messages": said([])}, "messages[0].content", ""),
    ({"messages": said([{"type": "text"}])}, "messages[0].content[0].text", ""),
    (
        {"messages": said([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])},
        "messages[0].content[1]",
        "unsupported_content",
    ),
    ({"messages": said("Hi", mood="good")}, "messages[0].mood", "unknown_parameter"),
    (
        {"messages": said("Hi", tool_calls=[{"id": "x"}])},
        "messages[0].tool_calls[0].function",
        MISSING,
    ),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": -0.1}, "temperature", ""),
    ({"temperature": 2.1}, "temperature", ""),
    ({"top_p": 0}, "top_p", ""),
    ({"top_p": 1.5}, "top_p", ""),
    ({"top_k": -1}, "top_k", ""),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 2}, "min_p", ""),
    ({"presence_penalty": -3}, "presence_penalty", ""),
    ({"frequency_penalty": 3}, "frequency_penalty", ""),
    ({"repetition_penalty": 0}, "repetition_penalty", ""),
    ({"seed": 2**63}, "seed", ""),
    ({"seed": -(2**63) - 1}, "seed", ""),
    ({"seed": "lucky"}, "seed", "invalid_type"),
    ({"stop": ""}, "stop", ""),
    ({"stop": ["a", ""]}, "stop", ""),
    ({"stop": list("abcde")}, "stop", ""),
    ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop", ""),
    ({"stop": {"a": 1}}, "stop", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", ""),
    ({"max_completion_tokens": -5}, "max_completion_tokens", ""),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", ""),
    ({"n": 0}, "n", ""),
    ({"n": 9}, "n", ""),
    ({"n": True}, "n", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", ""),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", ""),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs", ""),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ""),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", ""),
    ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"5": "much"}}, "logit_bias[...]", "invalid_type"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias", ""),
    ({"logit_bias": {"5": -101}}, "logit_bias", ""),
    ({"logit_bias": {"hello": 1}}, "logit_bias", ""),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ""),
    ({"logit_bias": {"05": 1}}, "logit_bias", ""),
    ({"logit_bias": {"9" * 60: 1}}, "logit_bias", ""),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", ""),
    ({"logit_bias": {"1" * n: 1 for n in range(9000, 9010)}}, "logit_bias", ""),
    ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", ""),
    ({"response_format": {"type": "xml"}}, "response_format.type", ""),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"service_tier": "scale"}, "service_tier", "unsupported_parameter"),
    ({"metadata": {"a": 1}}, "metadata[...]", "invalid_type"),
    ({"diptych": {"mode": "sideways"}}, "diptych.mode", ""),
    ({"diptych": {"mode": 3}}, "diptych.mode", "invalid_type"),
    ({"diptych": {"priority_class": "vip"}}, "diptych.priority_class", ""),
    ({"diptych": {"link": "string"}}, "diptych.link", ""),
    ({"diptych": {"path": "dis-tape"}}, "diptych.path", ""),
    ({"diptych": {"path": "dis-disk", "mode": "local"}}, "diptych.path", ""),
    ({"diptych": {"path": "colocated", "mode": "remote"}}, "diptych.path", ""),
    ({"diptych": {"speed": 9}}, "diptych.speed", "unknown_parameter"),
    ({"heat": 1}, "heat", "unknown_parameter"),
]


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("mode", "'local' or 'remote'"),
        ("link", "'shm', 'nixl' or 'tcp'"),
        ("path", "'colocated' or 'dis-gpu' or 'dis-cpu' or 'dis-disk'"),
        ("priority_class", "'interactive' or 'standard' or 'batch'"),
    ],
)
def test_a_choice_that_is_none_is_answered_with_the_choices(option: str, choices: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call(diptych={option: "sideways"})
    assert str(refused.value) == f"'diptych.{option}': expected {choices}, saw 'sideways'"


@pytest.mark.parametrize(("changes", "param", "code"), BAD_VALUES, ids=repr)
def test_a_bad_value_is_refused_by_name(changes: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call(**changes)
    assert caught.value.param == param
    assert (caught.value.code or "") == code
    assert len(str(caught.value)) < 400
    assert param in str(caught.value) or not param or param in ("model", "messages")


BAD_BYTES = [
    b"",
    b"{",
    b"[]",
    b'"hello"',
    b"nonsense",
    b'{"model":"tiny","messages":[],"temperature":NaN}',
    b'{"model":"tiny","messages":[],"temperature":1e999}',
    b'{"model":"t\xff","messages":[]}',
    b'{"model":"tiny","messages":[{"role":"user","content":"a \\ud800 b"}]}',
    b'{"model":"tiny","messages":[{"role":"user","content":"a \\udc00 b"}]}',
    b'{"model":"tiny","tools":' + b"[" * 100_000,
    b'{"model":"tiny","messages":[],"tools":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
    b"[" * 100_000,
    b'{"model":"tiny"}',
    b'{"messages":[]}',
]


@pytest.mark.parametrize("data", BAD_BYTES, ids=lambda data: repr(data[:40]))
def test_bytes_that_are_no_request_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(decode(data))
    assert caught.value.code in (
        "invalid_json",
        "invalid_type",
        "missing_required_parameter",
        "unsupported_parameter",
    )
    assert "Traceback" not in str(caught.value)


def test_a_lone_surrogate_is_called_by_its_name() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        decode(BAD_BYTES[8])


@pytest.mark.parametrize("link", ["shm", "tcp", None])
def test_a_link_can_be_forced(link: str | None) -> None:
    assert call(diptych={"link": link}).forced.link == link


@pytest.mark.parametrize("path", ["colocated", "dis-gpu", "dis-cpu", "dis-disk", None])
def test_a_path_can_be_forced(path: str | None) -> None:
    assert call(diptych={"path": path}).forced.path == path


def test_values_that_ask_for_nothing_are_accepted() -> None:
    for name, allowed in HARMLESS.items():
        for value in (None, *allowed):
            assert call(**{name: value}).model == "tiny"
    quiet = {"n": 1, "user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "seed": None}
    assert call(**quiet).seeded is False


def test_a_full_call_means_what_it_says() -> None:
    made = call(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        ],
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-5,
        stop=["x", "y"],
        max_completion_tokens=9,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        service_tier="flex",
        diptych={"mode": "remote", "link": "shm"},
    )
    assert made.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    ]
    assert made.sampling.temperature == 0
    assert made.sampling.top_k == 40
    assert (made.seeded, made.sampling.seed) == (True, -5)
    assert made.stop == ("x", "y")
    assert made.max_tokens == 9
    assert (made.stream, made.include_usage) == (True, True)
    assert made.priority_class is PriorityClass.BATCH
    assert (made.forced.mode, made.forced.link) == (Mode.REMOTE, "shm")

"""Every bad Responses body has an answer that names the parameter."""

import json
from typing import Any

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.requests import Mode
from diptych_contracts.responses import StoredMessage
from diptych_gateway.responses.bodies import decode_create, decode_response
from diptych_gateway.responses.checking import HARMLESS, ResponseCall, check_frame, check_response


def call(**changes: Any) -> ResponseCall:
    return check_response(
        decode_response(json.dumps({"model": "m", "input": "Hi", **changes}).encode())
    )


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


IMAGE = {"type": "input_image", "image_url": "data:,"}

MISSING = "missing_required_parameter"
BAD_VALUES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": 3}, "input", "invalid_type"),
    ({"input": []}, "input", MISSING),
    ({"input": None}, "input", MISSING),
    ({"input": ["Hi"]}, "input[0]", "invalid_type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", MISSING),
    ({"input": [{"type": "item_reference", "id": "f"}]}, "input[0]", "unsupported_content"),
    (
        {"input": [*said("a"), {"type": "item_reference", "id": "x"}]},
        "input[1]",
        "unsupported_content",
    ),
    (
        {"input": [{"type": "message", "content": "a"}]},
        "input[0].role",
        "missing_required_parameter",
    ),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", None),
    ({"input": said("a", mood="good")}, "input[0].mood", "unknown_parameter"),
    ({"input": said([])}, "input[0].content", None),
    (
        {"input": said([{"type": "input_text", "text": "a"}, IMAGE])},
        "input[0].content[1]",
        "unsupported_content",
    ),
    ({"input": said([{"type": "input_text"}])}, "input[0].content[0].text", None),
    ({"model": ""}, "model", None),
    ({"mood": "good"}, "mood", "unknown_parameter"),
    ({"messages": []}, "messages", "unknown_parameter"),
    ({"stop": "x"}, "stop", "unknown_parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"temperature": 3}, "temperature", None),
    ({"store": "yes"}, "store", "invalid_type"),
    ({"store": False, "background": True}, "background", None),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options.include_usage",
        "unsupported_parameter",
    ),
    ({"metadata": {"k": "v" * 513}}, "metadata", None),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", None),
    ({"diptych": {"link": "rdma"}}, "diptych.link", None),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", None),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
]


@pytest.mark.parametrize(("changes", "param", "code"), BAD_VALUES, ids=lambda v: str(v)[:40])
def test_a_bad_value_is_named(changes: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(InvalidRequest) as err:
        call(**changes)
    assert err.value.param == param
    assert err.value.code == code


@pytest.mark.parametrize("name", HARMLESS)
def test_what_asks_for_nothing_is_taken(name: str) -> None:
    for value in (None, *HARMLESS[name]):
        assert call(**{name: value}).input


def test_every_way_to_write_input_means_messages() -> None:
    given = call(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Rule"},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                ],
            },
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "c", "annotations": [], "logprobs": []}
                ],
            },
        ],
    )
    history = (StoredMessage(role="user", text="before"),)
    assert given.generation(history).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "before"},
        {"role": "system", "content": "Rule"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    ]


def test_what_is_stored_may_be_resumed_and_the_rest_only_if_asked() -> None:
    assert (call().store, call().resume) == (True, True)
    assert (call(store=False).store, call(store=False).resume) == (False, False)
    body = decode_response(b'{"model":"m","input":"a","store":false}')
    assert check_response(body, resume=True).resume


def test_the_path_can_be_forced_and_background_is_said() -> None:
    made = call(background=True, diptych={"mode": "local", "link": "shm"}).generation(())
    assert (made.forced.mode, made.forced.link) == (Mode.LOCAL, "shm")
    assert (made.background, made.resume) == (True, True)


def frame(**changes: Any) -> ResponseCall:
    data = {"type": "response.create", "model": "m", "input": "Hi", **changes}
    return check_frame(decode_create(json.dumps(data)))


def test_a_frame_takes_what_a_body_takes_but_what_is_http() -> None:
    assert frame(stream=True, background=None).input
    for changes, param in (({"stream": False}, "stream"), ({"background": True}, "background")):
        with pytest.raises(InvalidRequest) as err:
            frame(**changes)
        assert err.value.param == param


@pytest.mark.parametrize("nothing", [None, []])
def test_who_goes_on_or_has_instructions_need_not_say_more(nothing: Any) -> None:
    going_on = call(input=nothing, previous_response_id="resp_1")
    assert going_on.input == ()
    (first,) = call(input=nothing, instructions="Be brief.").generation(()).messages
    assert first["role"] == "system"


def test_a_conversation_of_nothing_is_refused() -> None:
    going_on = call(input=[], previous_response_id="resp_1")
    with pytest.raises(InvalidRequest) as err:
        going_on.generation(())
    assert err.value.param == "input"

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_gateway.doors.routes import CHAT_COMPLETIONS
from diptych_gateway.judging.bodies import decode
from diptych_gateway.judging.checking import check
from diptych_gateway.settings import GatewaySettings

OTHER = "gateway-00000000cccc"
OBEYING = {"grammars": True}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
TWO_CALLS = (
    "Let me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
FORCED = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CALL = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}


def says(text: str) -> Callable[[Any, Request], Awaitable[None]]:
    """A fleet that answers so, a token at a time."""

    async def script(fleet: Any, request: Request) -> None:
        ids = fleet.ids(text)
        for index, token in enumerate(ids):
            end = EndReason.STOP if index == len(ids) - 1 else None
            fleet.say(request, [token], index=index, end=end)

    return script


def put_together(events: list[tuple[str | None, Any]]) -> dict[str, Any]:
    """The message that a stream's chunks are, as a client joins them."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for _, chunk in events:
        if chunk == "[DONE]" or not chunk["choices"]:
            continue
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        message["finish"] = choice["finish_reason"] or message["finish"]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                assert call["type"] == "function"
                assert call["id"].startswith("call_")
                message["calls"].append([call["id"], call["function"]["name"], ""])
            message["calls"][call["index"]][2] += call["function"].get("arguments", "")
    return message


def prompt_of(stack: Any) -> str:
    ids = stack.fleet.requests[-1].prompt_ids
    return b"".join(map(stack.fleet.codec.token_bytes, ids)).decode()


async def test_calls_are_streamed_and_whole_answers_say_the_same(run_stack: Any) -> None:
    async with run_stack(says(TWO_CALLS)) as stack:
        message = put_together(await stack.events(tools=TOOLS))
        assert message["content"] == "Let me look."
        calls = [call[1:] for call in message["calls"]]
        assert calls == [["weather", '{"city": "Łódź"}'], ["clock", "{}"]]
        assert message["finish"] == "tool_calls"
        assert "Tells the weather" in prompt_of(stack)

        (choice,) = (await stack.chat(tools=TOOLS)).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me look."
        called = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [[one["name"], one["arguments"]] for one in called] == calls


async def test_arguments_come_as_they_are_made(run_stack: Any) -> None:
    async with run_stack(says(TWO_CALLS)) as stack:
        events = await stack.events(tools=TOOLS)
        ids = [number for number, _ in events if number is not None]
        assert len(ids) == len(set(ids))
        pieces = [
            call["function"].get("arguments", "")
            for _, chunk in events
            if chunk != "[DONE]"
            for call in chunk["choices"][0]["delta"].get("tool_calls", ())
            if call["index"] == 0
        ]
        assert len([piece for piece in pieces if piece]) > 5


async def test_one_call_where_calls_are_not_to_be_parallel(run_stack: Any) -> None:
    async with run_stack(says(TWO_CALLS)) as stack:
        message = put_together(await stack.events(tools=TOOLS, parallel_tool_calls=False))
        assert [call[1] for call in message["calls"]] == ["weather"]
        assert message["finish"] == "tool_calls"


async def test_content_is_null_where_there_are_calls_alone(run_stack: Any) -> None:
    async with run_stack(says(FORCED), card=OBEYING) as stack:
        choice = {"type": "function", "function": {"name": "clock"}}
        (answer,) = (await stack.chat(tools=TOOLS, tool_choice=choice)).json()["choices"]
        assert answer["message"]["content"] is None
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "clock"
        grammar = stack.fleet.requests[-1].sampling.grammar
        assert grammar.kind == "lark"
        assert '\\"clock\\"' in grammar.text
        assert "weather" not in grammar.text
        assert "between" not in grammar.text


@pytest.mark.parametrize(
    ("more", "told", "forced"),
    [
        ({}, {"weather", "clock"}, set()),
        ({"tool_choice": "auto"}, {"weather", "clock"}, set()),
        ({"tool_choice": "required"}, {"weather", "clock"}, {"weather", "clock"}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [CLOCK]},
                }
            },
            {"clock"},
            set(),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [WEATHER]},
                }
            },
            {"weather", "clock"},
            {"weather"},
        ),
        ({"tool_choice": "none"}, set(), set()),
    ],
)
async def test_a_choice_says_what_is_told_and_what_is_forced(
    run_stack: Any, more: dict[str, Any], told: set[str], forced: set[str]
) -> None:
    async with run_stack(says("Hello"), card=OBEYING) as stack:
        (choice,) = (await stack.chat(tools=TOOLS, **more)).json()["choices"]
        request = stack.fleet.requests[-1]
        prompt = prompt_of(stack)
        assert {name for name in ("weather", "clock") if f'"{name}"' in prompt} == told
        grammar = request.sampling.grammar
        text = "" if grammar is None else grammar.text
        assert {name for name in ("weather", "clock") if f'\\"{name}\\"' in text} == forced
        assert choice["message"]["content"] == "Hello"
        assert choice["finish_reason"] == "stop"
        assert (request.answer_format is None) == (not told)


@pytest.mark.parametrize(("more", "several"), [({}, False), ({"parallel_tool_calls": True}, True)])
async def test_a_demand_is_met_by_one_call_unless_more_are_asked_for(
    run_stack: Any, more: dict[str, Any], several: bool
) -> None:
    async with run_stack(says(FORCED), card=OBEYING) as stack:
        await stack.chat(tools=TOOLS, tool_choice="required", **more)
        assert ("between" in stack.fleet.requests[-1].sampling.grammar.text) == several


async def test_an_operator_may_say_how_a_model_writes(run_stack: Any) -> None:
    parsers = {"tool_parsers": "other=mistral, tiny=none", "reasoning_parsers": "tiny=think"}
    async with run_stack(says("<think>Hm.</think>Hello"), **parsers) as stack:
        (choice,) = (await stack.chat()).json()["choices"]
        assert choice["message"]["reasoning_content"] == "Hm."
    with pytest.raises(ValueError, match="saw 'klingon'"):
        GatewaySettings(tool_parsers="tiny=klingon")
    with pytest.raises(ValueError, match="expected model=parser"):
        GatewaySettings(reasoning_parsers="think")


async def test_a_model_that_follows_no_grammar_cannot_be_forced(run_stack: Any) -> None:
    async with run_stack(says("Hello"), card={"grammars": False}) as stack:
        answer = await stack.chat(tools=TOOLS, tool_choice="required")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tool_choice"


async def test_a_document_may_be_a_call_instead(run_stack: Any) -> None:
    form = {"type": "json_object"}
    async with run_stack(says(FORCED), card=OBEYING) as stack:
        (choice,) = (await stack.chat(tools=TOOLS, response_format=form)).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        grammar = stack.fleet.requests[-1].sampling.grammar
        assert grammar.text.startswith("start: (calls | document)")


async def test_a_document_comes_after_what_a_model_thinks(run_stack: Any) -> None:
    form = {"type": "json_object"}
    async with run_stack(says("Hm.</think>\n\n{}"), card=THINKING) as stack:
        (choice,) = (await stack.chat(response_format=form)).json()["choices"]
        assert choice["message"]["content"] == "{}"
        grammar = stack.fleet.requests[-1].sampling.grammar
        assert grammar.text.startswith("start: thought (document)")


async def test_strict_tools_are_guarded_by_a_grammar(run_stack: Any) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with run_stack(says("Hello"), card=OBEYING) as stack:
        await stack.chat(tools=[strict])
        assert "prose" in stack.fleet.requests[-1].sampling.grammar.text


@pytest.mark.parametrize(("choice", "param"), [("required", "tool_choice"), ("auto", "tools")])
async def test_a_strict_schema_that_cannot_be_honoured_is_refused(
    run_stack: Any, choice: str, param: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"name": "f", "parameters": schema}
    async with run_stack(says("Hello"), card=OBEYING) as stack:
        strict = [{"type": "function", "function": {**tool, "strict": True}}]
        answer = await stack.chat(tools=strict, tool_choice=choice)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert "uniqueItems" in answer.json()["error"]["message"]
        lenient = [{"type": "function", "function": tool}]
        assert (await stack.chat(tools=lenient, tool_choice=choice)).status_code == 200


async def test_a_tool_loop_goes_into_the_prompt(run_stack: Any) -> None:
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
    ]
    async with run_stack(says("It is noon")) as stack:
        (choice,) = (await stack.chat(tools=TOOLS, messages=messages)).json()["choices"]
        assert choice["message"]["content"] == "It is noon"
        prompt = prompt_of(stack)
        assert '{"name": "clock", "arguments": {}}' in prompt
        assert "<tool_response>\nnoon\n</tool_response>" in prompt


def kept(text: str) -> Callable[[Any, Request], Awaitable[None]]:
    """The same, with a record, as a scheduler keeps it."""

    async def script(fleet: Any, request: Request) -> None:
        record = RequestRecord(
            request_id=request.request_id,
            owner=Incarnation("scheduler-1"),
            gateway=request.gateway,
            state=RecordState.ROUTED,
            request_seq=7,
            head=request.head,
        )
        await fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).create(request.request_id, record)
        await says(text)(fleet, request)

    return script


async def test_a_stream_goes_on_after_any_event_within_arguments(run_stack: Any) -> None:
    resume = {"x-diptych-resume": "1"}
    async with run_stack(kept(TWO_CALLS)) as stack, stack.another(OTHER) as other:
        body = stack.body(stream=True, tools=TOOLS)
        whole = await stack.client.post(CHAT_COMPLETIONS, json=body, headers=resume)
        events = numbered(whole.text)
        for place in (0, 1, 2, *range(3, len(events), 7), len(events) - 1):
            again = {**resume, "last-event-id": events[place][0]}
            rest = await other.post(CHAT_COMPLETIONS, json=body, headers=again)
            assert numbered(rest.text) == events[place + 1 :]
        request_id = events[0][0].split(":")[0]
        answer = await other.get(f"{CHAT_COMPLETIONS}/chatcmpl-{request_id}")
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert len(choice["message"]["tool_calls"]) == 2


def numbered(text: str) -> list[tuple[str, str]]:
    """Every event that has an id, with its data."""
    found = []
    for block in text.split("\n\n"):
        lines = [line.split(": ", 1) for line in block.strip().split("\n") if ": " in line]
        fields = dict(lines)
        if "id" in fields:
            found.append((fields["id"], fields["data"]))
    return found


THINKING = {
    "grammars": True,
    "chat_template": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}"
        "<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    ),
}


async def test_what_a_model_thinks_is_told_apart(run_stack: Any) -> None:
    async with run_stack(says("They greet.\n</think>\n\nHello!"), card=THINKING) as stack:
        message = put_together(await stack.events())
        assert message["reasoning"] == "They greet."
        assert message["content"] == "Hello!"
        assert message["finish"] == "stop"
        (choice,) = (await stack.chat()).json()["choices"]
        assert choice["message"]["reasoning_content"] == "They greet."
        assert choice["message"]["content"] == "Hello!"


async def test_effort_is_passed_to_a_template_that_knows_it(run_stack: Any) -> None:
    async with run_stack(says("Hello!"), card=THINKING) as stack:
        (choice,) = (await stack.chat(reasoning_effort="none")).json()["choices"]
        assert choice["message"]["content"] == "Hello!"
        assert prompt_of(stack).endswith("</think>\n\n")


async def test_effort_is_refused_where_the_template_knows_none(run_stack: Any) -> None:
    async with run_stack(says("Hello!")) as stack:
        assert (await stack.chat(reasoning_effort="none")).status_code == 200
        for effort in ("high", "endless"):
            answer = await stack.chat(reasoning_effort=effort)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "reasoning_effort"


def bad(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def nested(levels: int) -> Any:
    return {"type": "object", "a": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        (bad(name="a b"), "tools[0].function.name"),
        (bad(name="a" * 65), "tools[0].function.name"),
        (bad(description="a" * 20_000), "tools[0].function.description"),
        (bad(parameters=[]), "tools[0].function.parameters"),
        (bad(parameters={"type": "string"}), "tools[0].function.parameters.type"),
        (bad(parameters=nested(70)), "tools[0].function.parameters"),
        (bad(colour="red"), "tools[0].function.colour"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1]"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]},
            "messages[0].tool_call_id",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **changes}
    with pytest.raises(Exception, match=r"expected|unknown|two tools") as caught:
        check(decode(json.dumps(body).encode()))
    assert getattr(caught.value, "param", None) == param
    if param == "functions":
        assert "'tools' has taken its place" in str(caught.value)


async def test_each_of_several_answers_has_its_calls(run_stack: Any) -> None:
    async with run_stack(says(TWO_CALLS)) as stack:
        choices = (await stack.chat(tools=TOOLS, n=2)).json()["choices"]
        ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
        assert len(ids) == 4
        assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "tool_calls"]
        streamed = await stack.events(tools=TOOLS, n=2)
        for index in range(2):
            own = [
                (number, chunk)
                for number, chunk in streamed
                if chunk != "[DONE]" and chunk["choices"][0]["index"] == index
            ]
            assert len(put_together(own)["calls"]) == 2


def test_parameters_that_are_no_text_are_told() -> None:
    tools = b'[{"type":"function","function":{"name":"f","parameters":{"title":"\xff"}}}]'
    data = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":' + tools + b"}"
    with pytest.raises(InvalidRequest, match="expected JSON in UTF-8") as caught:
        check(decode(data))
    assert caught.value.param == "tools[0].function.parameters"

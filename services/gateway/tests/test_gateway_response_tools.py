"""Tools and reasoning over the Responses API: items, events, chains; strictly by the schema."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from diptych_contracts.answer_formats import AnswerFormat
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import Request
from diptych_contracts.responses import StoredAnswer, StoredMessage, StoredResponse
from diptych_contracts.sampling import Sampling
from diptych_gateway.responses.bodies import decode_response
from diptych_gateway.responses.checking import check_response
from diptych_gateway.responses.input_items import as_messages, read_item
from diptych_gateway.responses.objects import shown
from diptych_gateway.responses.part_events import events_of, replayed

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"type": "function", "name": "clock"}
TOOLS = [WEATHER, CLOCK]
CALLS = (
    "Let me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
THOUGHT = f"<think>\nHm, a question.\n</think>\n\n{CALLS}"
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
THINKING = {"reasoning_parser": "think", "tool_parser": "hermes"}


def says(*texts: str) -> Callable[[Any, Request], Awaitable[None]]:
    """A fleet that answers so, one text after another, a token at a time."""
    left = list(texts)

    async def script(fleet: Any, request: Request) -> None:
        ids = fleet.ids(left.pop(0) if len(left) > 1 else left[0])
        for index, token in enumerate(ids):
            end = EndReason.STOP if index == len(ids) - 1 else None
            fleet.say(request, [token], index=index, end=end)

    return script


def prompt_of(stack: Any) -> str:
    ids = stack.fleet.requests[-1].prompt_ids
    return b"".join(map(stack.fleet.codec.token_bytes, ids)).decode()


async def test_items_are_reasoning_a_message_and_calls(
    run_stack: Any, conforms: Callable[[Any], None]
) -> None:
    async with run_stack(says(THOUGHT), card=THINKING) as stack:
        response = (await stack.respond(tools=TOOLS, tool_choice="auto")).json()
        conforms(response)
        thought, message, weather, clock = response["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, a question."}]
        assert message["content"][0]["text"] == "Let me look."
        assert (weather["name"], weather["arguments"]) == ("weather", '{"city": "Łódź"}')
        assert (clock["name"], clock["arguments"]) == ("clock", "{}")
        assert weather["call_id"] != clock["call_id"]
        assert response["tools"][0] == WEATHER | {"strict": None}
        assert response["status"] == "completed"
        thoughts = response["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert thoughts == 20, "its letters, and those of the end mark but the last"


async def test_events_open_and_close_every_item_and_can_be_taken_up_anywhere(
    run_stack: Any, conforms: Callable[[Any], None]
) -> None:
    async with run_stack(says(THOUGHT), card=THINKING) as stack:
        answer = await stack.client.post(
            "/v1/responses", json=stack.asked(tools=TOOLS, stream=True)
        )
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if "data: {" in line]
        for number, event in enumerate(events):
            assert event["sequence_number"] == number
            conforms(event)
        types = [event["type"] for event in events]
        assert types.count("response.output_item.added") == 4
        assert types.count("response.output_item.done") == 4
        assert types.count("response.function_call_arguments.done") == 2
        arguments = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
        assert "".join(arguments) == '{"city": "Łódź"}{}'
        assert len(arguments) > 5
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        last = events[-1]["response"]
        assert last["output"] == done
        assert [e["output_index"] for e in events if e["type"].endswith("item.done")] == [
            0,
            1,
            2,
            3,
        ]

        path = f"/v1/responses/{last['id']}"
        stored = (await stack.client.get(path)).json()
        assert stored == last
        for after in (0, 5, len(events) // 2, len(events) - 2):
            rest = [data for _, data in await stack.read(path, after) if data != "[DONE]"]
            assert rest == events[after + 1 :]


async def test_a_chain_goes_on_with_the_results_of_its_calls(run_stack: Any) -> None:
    async with run_stack(says(CALLS, "It is noon.")) as stack:
        first = (await stack.respond(tools=TOOLS)).json()
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "noon"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        second = await stack.respond(tools=TOOLS, input=results, previous_response_id=first["id"])
        assert second.json()["output"][0]["content"][0]["text"] == "It is noon."
        prompt = prompt_of(stack)
        assert 'Let me look.\n<tool_call>\n{"name": "weather"' in prompt
        assert prompt.count("<tool_response>\nnoon\n</tool_response>") == 2

        sent_back = [{"role": "user", "content": "Hello"}, *first["output"], *results]
        await stack.respond(tools=TOOLS, input=sent_back, store=False)
        assert prompt_of(stack) == prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}])
async def test_a_call_can_be_demanded(
    run_stack: Any, conforms: Callable[[Any], None], choice: Any
) -> None:
    text = '<tool_call>\n{"name": "clock", "arguments": {}}'
    async with run_stack(says(text), card={"grammars": True}) as stack:
        response = (await stack.respond(tools=TOOLS, tool_choice=choice)).json()
        conforms(response)
        assert response["tool_choice"] == choice
        assert [item["type"] for item in response["output"]] == ["function_call"]
        assert stack.fleet.requests[-1].sampling.grammar is not None


STORED = StoredResponse(
    request_id=RequestId("0" * 32),
    gateway=Incarnation("gateway-1"),
    journal_seq=7,
    model="tiny",
    created_unix_ms=1_700_000_000_123,
    deadline_unix_ms=1_700_003_600_123,
    prompt_tokens=3,
    sampling=Sampling(),
    input=(StoredMessage(role="user", text="Hi"),),
    answer_format=AnswerFormat(tools="hermes", reasoning="think"),
)


@pytest.mark.parametrize("reason", list(EndReason))
@pytest.mark.parametrize("chars", [0, 3, 12, 27, 45, 60, 95, len(THOUGHT)])
def test_events_of_an_answer_cut_off_anywhere_agree_with_its_object(
    reason: EndReason, chars: int, conforms: Callable[[Any], None]
) -> None:
    end = End(request_id=STORED.request_id, attempt=1, reason=reason, tokens=chars)
    answer = StoredAnswer(
        deltas=tuple(THOUGHT[:chars]), tokens=chars, end=end, ended_unix_s=1_700_000_009
    )
    events = [event for several in replayed(STORED, answer) for event in several]
    said = [json.loads(event.data) for event in events]
    for event in said:
        conforms(event)
    done = [event["item"] for event in said if event["type"] == "response.output_item.done"]
    assert said[-1]["response"]["output"] == done
    whole = shown(msgspec.structs.replace(STORED, answer=answer))
    assert json.loads(msgspec.json.encode(whole)) == said[-1]["response"]
    for after in range(0, len(events), 9):
        rest = [e for several in replayed(STORED, answer, after=after) for e in several]
        assert rest == events[after + 1 :]


def test_a_plain_answer_has_the_plain_events() -> None:
    plain = msgspec.structs.replace(STORED, answer_format=None)
    assert type(events_of(plain)).__name__ == "ResponseEvents"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (
            {"type": "function_call", "call_id": "", "name": "f", "arguments": ""},
            "input[0].call_id",
        ),
        ({"type": "function_call", "call_id": "a", "name": "", "arguments": ""}, "input[0].name"),
        ({"type": "function_call_output", "call_id": "a", "output": []}, "input[0].output"),
        (
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]},
            "input[0].output[0]",
        ),
        (
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            "input[0].encrypted_content",
        ),
    ],
)
def test_an_item_that_does_not_fit_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(Exception, match="expected") as caught:
        read_item("input[0]", msgspec.Raw(json.dumps(item).encode()))
    assert getattr(caught.value, "param", None) == param


def test_a_result_without_its_call_is_named() -> None:
    result = {"type": "function_call_output", "call_id": "a", "output": "noon"}
    body = decode_response(json.dumps({"model": "tiny", "input": [result]}).encode())
    with pytest.raises(Exception, match="expected a result of a call made before it") as caught:
        check_response(body).generation(())
    assert getattr(caught.value, "param", None) == "input[0]"


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": "Let me look."},
        {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "noon"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "Noon."},
    ]
    read = [read_item("x", msgspec.Raw(json.dumps(item).encode())) for item in items]
    answer, result, last = as_messages(message for message in read if message is not None)
    assert answer["content"] == "Let me look."
    assert answer["reasoning_content"] == "Hm"
    assert [call["id"] for call in answer["tool_calls"]] == ["a", "b"]
    assert result == {"role": "tool", "content": "noon", "tool_call_id": "a"}
    assert last["content"] == "Noon."

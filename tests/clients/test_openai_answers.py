"""The stock `openai` package for Python: tools, structured answers, logprobs, choices."""

import json
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from diptych_testkit.live_stack import MODEL

pytestmark = pytest.mark.clients

QUESTION = "What is the weather in Paris?"
ASKED: Any = [{"role": "user", "content": QUESTION}]
LOOK = "get_weather"


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    city: Literal["Paris", "Rome"]
    day: Literal["today", "tomorrow"]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    sky: Literal["sunny", "cloudy"]
    degrees: Literal[10, 20, 30]
    warm: bool


TOOL: Any = pydantic_function_tool(GetWeather, name=LOOK)
NAMED: Any = {"type": "function", "function": {"name": LOOK}}
FLAT: Any = {"type": "function", **TOOL["function"]}


class TestTools:
    def test_a_loop_over_chat(self, client: openai.OpenAI) -> None:
        first = client.chat.completions.parse(
            model=MODEL, messages=ASKED, tools=[TOOL], tool_choice="required", temperature=0
        )
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, GetWeather)
        # As at OpenAI, what the library parsed may not be sent back.
        parsed: Any = {
            "parsed": True,
            "tool_calls": {"__all__": {"function": {"parsed_arguments"}}},
        }
        message = choice.message.model_dump(exclude=parsed, exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        second = client.chat.completions.create(
            model=MODEL,
            messages=[*ASKED, message, result],
            tools=[TOOL],
            tool_choice="none",
            temperature=0,
            max_tokens=24,
        )
        assert second.choices[0].message.content

    def test_arguments_are_streamed(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(
            model=MODEL, messages=ASKED, tools=[TOOL], tool_choice=NAMED, temperature=0
        ) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
        assert len(deltas) > 3
        (call,) = final.choices[0].message.tool_calls or ()
        assert "".join(delta.arguments_delta for delta in deltas) == call.function.arguments
        assert isinstance(call.function.parsed_arguments, GetWeather)

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_loop_over_responses(self, client: openai.OpenAI, streamed: bool) -> None:
        asked: Any = {
            "model": MODEL,
            "input": QUESTION,
            "tools": [FLAT],
            "tool_choice": {"type": "function", "name": LOOK},
            "temperature": 0,
        }
        if streamed:
            with client.responses.stream(**asked) as stream:
                kinds = [event.type for event in stream]
                first: Any = stream.get_final_response()
            assert "response.function_call_arguments.delta" in kinds
            assert "response.function_call_arguments.done" in kinds
        else:
            first = client.responses.create(**asked)
        (call,) = first.output
        GetWeather.model_validate_json(call.arguments)
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = client.responses.create(
            model=MODEL,
            input=[output],
            previous_response_id=first.id,
            temperature=0,
            max_output_tokens=24,
        )
        assert second.output_text


class TestStructured:
    def test_chat_is_parsed(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.parse(
            model=MODEL, messages=ASKED, response_format=Weather, temperature=0
        )
        assert isinstance(whole.choices[0].message.parsed, Weather)
        with client.chat.completions.stream(
            model=MODEL, messages=ASKED, response_format=Weather, temperature=0
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == whole.choices[0].message.parsed

    def test_a_response_is_parsed(self, client: openai.OpenAI) -> None:
        whole = client.responses.parse(
            model=MODEL, input=QUESTION, text_format=Weather, temperature=0
        )
        assert isinstance(whole.output_parsed, Weather)
        with client.responses.stream(
            model=MODEL, input=QUESTION, text_format=Weather, temperature=0
        ) as stream:
            assert stream.get_final_response().output_parsed == whole.output_parsed

    def test_any_object(self, client: openai.OpenAI) -> None:
        made = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Answer in JSON: what is two and two?"}],
            response_format={"type": "json_object"},
            temperature=0,
            max_tokens=200,
        )
        if made.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(made.choices[0].message.content or ""), dict)

    def test_a_schema_that_cannot_be_obeyed_is_named(self, client: openai.OpenAI) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
        with pytest.raises(openai.BadRequestError, match="nonsense") as seen:
            client.chat.completions.create(
                model=MODEL,
                messages=ASKED,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema},
                },
            )
        assert (seen.value.param or "").startswith("response_format")


class TestChoices:
    def test_logprobs_of_chat(self, client: openai.OpenAI) -> None:
        asked: Any = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 8}
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
        told = whole.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert "".join(entry.token for entry in told.content) == whole.choices[0].message.content
        for entry in told.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob == entry.top_logprobs[0].logprob, "greedy takes the likeliest"
            assert bytes(entry.bytes or ()).decode() == entry.token
        chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
        streamed = [
            entry
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content or ()
        ]
        assert streamed == told.content

    def test_logprobs_of_a_response(self, client: openai.OpenAI) -> None:
        made: Any = client.responses.create(
            model=MODEL,
            input=QUESTION,
            temperature=0,
            max_output_tokens=8,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
        (part,) = made.output[0].content
        assert "".join(entry.token for entry in part.logprobs) == part.text
        assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}

    def test_several_answers(self, client: openai.OpenAI) -> None:
        asked: Any = {"model": MODEL, "messages": ASKED, "n": 3, "seed": 5, "max_tokens": 8}
        whole = client.chat.completions.create(**asked, temperature=1.2)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        said = [""] * 3
        for chunk in client.chat.completions.create(**asked, temperature=1.2, stream=True):
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
        assert said == [choice.message.content for choice in whole.choices]
        assert len(set(said)) > 1

    def test_a_token_is_forced_and_one_forbidden(self, client: openai.OpenAI) -> None:
        forced = client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=3, logit_bias={"28": 100}, temperature=0
        )
        text = forced.choices[0].message.content or ""
        assert len(set(text)) == 1, "one token, three times"

    def test_the_older_completions(self, client: openai.OpenAI) -> None:
        asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 6}
        prompts = ["The capital of France is", "Two and two is"]
        whole = client.completions.create(**asked, prompt=prompts, logprobs=1)
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert "Paris" in whole.choices[0].text
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.tokens or ()) == 6
        streamed = client.completions.create(**asked, prompt=prompts[0], stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text

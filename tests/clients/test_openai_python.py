"""The stock `openai` package for Python, unmodified, on the default model."""

import json
from typing import Any

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = pytest.mark.clients

FRANCE: Any = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
ANSWER = "The capital of France is Paris."
STORY = "Write a long story about a lighthouse keeper."


def test_a_chat_whole_and_as_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    choice = whole.choices[0]
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole._request_id

    stream = client.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(said) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert (last.choices, last.usage and last.usage.total_tokens) == ([], whole.usage.total_tokens)


def test_the_helper_that_collects_a_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=FRANCE, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == ANSWER


def test_a_chat_is_bounded_and_stopped(client: openai.OpenAI) -> None:
    bounded = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_completion_tokens=3
    )
    assert bounded.choices[0].finish_reason == "length"
    assert bounded.usage is not None
    assert bounded.usage.completion_tokens == 3
    stopped = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, stop=[" France"]
    )
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        "The capital of",
        "stop",
    )


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def asked(seed: int) -> str | None:
        made = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": STORY}],
            seed=seed,
            temperature=1.2,
            top_p=0.95,
            max_tokens=24,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            user="somebody",
            metadata={"a": "b"},
        )
        return made.choices[0].message.content

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_the_raw_answer_has_a_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=FRANCE, max_tokens=1
    )
    assert raw.headers["x-request-id"] == raw.request_id
    assert raw.headers["content-type"].startswith("application/json")


def test_a_client_that_leaves_a_stream_is_forgotten(
    client: openai.OpenAI, stack: LiveStack
) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": STORY}],
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        for _, _chunk in zip(range(5), stream, strict=False):
            pass
    again = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert again.choices[0].message.content == ANSWER


ASKED: Any = {"model": MODEL, "input": STORY, "temperature": 0, "max_output_tokens": 40}


class TestResponses:
    """HTTP, SSE and WebSocket, which must say the same."""

    def test_whole_streamed_retrieved_and_deleted(self, client: openai.OpenAI) -> None:
        whole = client.responses.create(**ASKED)
        assert whole.status == "incomplete"
        events = list(client.responses.create(**ASKED, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text

        last: Any = events[-1]
        later = client.responses.retrieve(last.response.id, stream=True, starting_after=20)
        seen = list(later)
        assert [event.sequence_number for event in seen] == list(range(21, len(events)))
        assert seen[-1].type == "response.incomplete"
        again = client.responses.retrieve(last.response.id)
        assert again.output_text == whole.output_text
        assert again.usage == last.response.usage

        client.responses.delete(last.response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)

    def test_the_helper_that_collects(self, client: openai.OpenAI) -> None:
        with client.responses.stream(model=MODEL, input=FRANCE, temperature=0) as stream:
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert (final.output_text, text) == (ANSWER, ANSWER)

    # `openai` 3.57 opens its synchronous WebSocket in a way that `websockets` 17 advises against.
    @pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
    def test_a_websocket_carries_a_conversation(self, client: openai.OpenAI) -> None:
        asked = {key: value for key, value in ASKED.items() if key != "input"}
        expected = client.responses.create(**ASKED).output_text
        with client.responses.connect() as connection:
            previous: Any = openai.omit
            for words in (STORY, "Go on."):
                connection.response.create(
                    **asked, input=words, previous_response_id=previous, store=False
                )
                text = ""
                for event in connection:
                    if event.type == "response.output_text.delta":
                        text += event.delta
                    if event.type == "response.incomplete":
                        previous = event.response.id
                        break
                if words == STORY:
                    assert text == expected
                assert text
            connection.response.create(model="nobody", input="Hello")
            error: Any = connection.recv()
            assert (error.type, error.error.code) == ("error", "model_not_found")
            connection.response.create(**ASKED)
            assert connection.recv().type == "response.created", "the socket stayed open"

    def test_cancel_in_the_middle_of_a_stream(self, client: openai.OpenAI) -> None:
        endless = ASKED | {"max_output_tokens": 1500}
        stream = client.responses.create(**endless, stream=True, extra_body={"ignore_eos": True})
        seen: list[Any] = []
        for event in stream:
            seen.append(event)
            if len(seen) == 10:
                cancelled = client.responses.cancel(seen[0].response.id)
                assert cancelled.status == "cancelled"
        assert seen[-1].type == "response.incomplete"
        assert seen[-1].response.status == "cancelled"
        assert client.responses.retrieve(seen[0].response.id).status == "cancelled"

    def test_a_background_response_goes_on_alone(self, client: openai.OpenAI) -> None:
        running = client.responses.create(**ASKED, background=True)
        assert running.status == "in_progress"
        with client.responses.retrieve(running.id, stream=True) as stream:
            last: Any = list(stream)[-1]
        assert last.response.status == "incomplete"
        assert client.responses.retrieve(running.id).output_text == last.response.output_text

    def test_metadata_and_instructions_come_back(self, client: openai.OpenAI) -> None:
        made = client.responses.create(**ASKED, instructions="Be brief.", metadata={"topic": "sea"})
        found = json.loads(client.responses.retrieve(made.id).model_dump_json())
        assert (found["instructions"], found["metadata"]) == ("Be brief.", {"topic": "sea"})

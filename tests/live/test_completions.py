"""The stock client's completions, choices and logprobs, against processes and real weights."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import Completion

from diptych_testkit.live_model import codec
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        yield client


async def complete(client: openai.AsyncOpenAI, prompt: Any, **more: Any) -> Completion:
    asked = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12, **more}
    answer: Completion = await client.completions.create(**asked)
    return answer


async def test_text_and_its_token_ids_are_completed_alike(client: openai.AsyncOpenAI) -> None:
    text = "The capital of France is"
    ids = codec().encode(text)
    by_text, by_ids = await asyncio.gather(complete(client, text), complete(client, ids))
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert "Paris" in by_text.choices[0].text
    assert (by_text.object, by_text.id[:5]) == ("text_completion", "cmpl-")
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(ids)


async def test_many_prompts_are_answered_in_order_with_echo(client: openai.AsyncOpenAI) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    alone = [(await complete(client, prompt)).choices[0].text for prompt in prompts]
    together = await complete(client, prompts, echo=True, n=2)
    texts = [choice.text for choice in sorted(together.choices, key=lambda c: c.index)]
    assert texts == [p + t for p, t in zip(prompts, alone, strict=True) for _ in range(2)]


async def test_completions_stream_with_logprobs_and_usage(client: openai.AsyncOpenAI) -> None:
    prompt = "The capital of France is"
    whole = await complete(client, prompt, logprobs=3)
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        temperature=0,
        max_tokens=12,
        logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(c.text for c in choices) == whole.choices[0].text
    expected = whole.choices[0].logprobs
    assert expected is not None
    told = [c.logprobs for c in choices if c.logprobs]
    assert [t for some in told for t in some.tokens or ()] == expected.tokens
    assert [p for some in told for p in some.token_logprobs or ()] == pytest.approx(
        expected.token_logprobs, abs=1e-4
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert expected.tokens is not None
    assert "".join(expected.tokens) == whole.choices[0].text
    assert expected.text_offset == np.cumsum([0, *map(len, expected.tokens[:-1])]).tolist()


async def test_chat_streams_three_choices_with_logprobs(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 16,
        "logprobs": True,
        "top_logprobs": 5,
        "seed": 3,
        "temperature": 1.0,
        "n": 3,
    }
    stream = await client.chat.completions.create(**asked, stream=True)
    texts, told, ends = {}, {}, {}
    async for chunk in stream:
        for choice in chunk.choices:
            number = choice.index
            texts[number] = texts.get(number, "") + (choice.delta.content or "")
            told.setdefault(number, [])
            if choice.logprobs and choice.logprobs.content:
                told[number] += choice.logprobs.content
            if choice.finish_reason:
                assert number not in ends
                ends[number] = choice.finish_reason
    assert sorted(texts) == sorted(ends) == [0, 1, 2]
    assert len(set(texts.values())) == 3
    for number, tokens in told.items():
        data = b"".join(bytes(token.bytes or ()) for token in tokens)
        assert data.decode("utf-8", "replace") == texts[number]
        for token in tokens:
            ranked = [likely.logprob for likely in token.top_logprobs]
            assert len(ranked) == 5
            assert ranked == sorted(ranked, reverse=True)
            assert token.logprob <= ranked[0] <= 0
            assert sum(np.exp(ranked)) <= 1.001


async def test_greedy_choices_are_equal_and_the_likeliest(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=8,
        n=2,
        logprobs=True,
        top_logprobs=1,
    )
    first, second = answer.choices
    assert first.message.content == second.message.content
    assert first.logprobs is not None
    for token in first.logprobs.content or ():
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == token.top_logprobs[0].logprob


async def test_a_bias_forbids_a_token_and_another_forces_one(client: openai.AsyncOpenAI) -> None:
    free = await complete(client, "The capital of France is", max_tokens=1)
    (banned,) = codec().encode(free.choices[0].text, add_bos=False)
    (forced,) = codec().encode(" London", add_bos=False)
    other = await complete(
        client, "The capital of France is", max_tokens=1, logit_bias={str(banned): -100}
    )
    london = await complete(
        client, "The capital of France is", max_tokens=2, logit_bias={str(forced): 100}
    )
    assert other.choices[0].text != free.choices[0].text
    assert london.choices[0].text == " London London"


async def test_a_token_that_does_not_exist_is_refused_and_kills_nobody(
    client: openai.AsyncOpenAI,
) -> None:
    """A prompt id beyond the vocabulary once ended a worker's engine."""
    vocab = codec().vocab_size
    with pytest.raises(openai.BadRequestError) as bad:
        await complete(client, [1, vocab])
    assert bad.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as bad:
        await complete(client, "Hi", logit_bias={str(vocab): 1})
    assert bad.value.param == "logit_bias"
    assert (await complete(client, [1, 2, 3])).choices

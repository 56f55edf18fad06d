"""The stock `openai` client, unmodified."""

from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


async def test_the_stock_client_streams_asks_whole_and_reads_errors(stack: Any) -> None:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello world"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2

        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert whole.choices[0].message.content == "Hello world"
        assert whole._request_id

        models = await client.models.list()
        assert [model.id for model in models.data] == ["tiny"]

        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
        assert bad.value.param == "n"

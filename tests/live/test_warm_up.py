"""`generate: false` on real weights: the prompt's KV is there when the next turn comes."""

from typing import Any

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = pytest.mark.live

RULES = "You are a patient librarian. " + "Recommend one book, and say in a line why. " * 20
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}


async def last_of_turn(connection: Any) -> Any:
    async for event in connection:
        if event.type in ("response.completed", "response.incomplete", "error"):
            return event
    raise AssertionError("the socket closed")


@pytest.mark.parametrize("store", [True, False])
async def test_the_turn_after_a_warm_up_finds_its_prefix(stack: LiveStack, store: bool) -> None:
    said = [{"role": "system", "content": f"Kept: {store}. {RULES}"}]
    client = openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0, timeout=90)
    async with client, client.responses.connect() as connection:
        await connection.response.create(**ASKED, input=said, store=store, generate=False)  # type: ignore[arg-type]
        warmed = (await last_of_turn(connection)).response
        assert (warmed.status, warmed.output, warmed.usage.output_tokens) == ("completed", [], 0)
        assert warmed.usage.input_tokens > 150
        assert warmed.usage.input_tokens_details.cached_tokens == 0
        await connection.response.create(
            **ASKED, input="A book about the sea?", store=store, previous_response_id=warmed.id
        )
        answer = (await last_of_turn(connection)).response
    cached = answer.usage.input_tokens_details.cached_tokens
    assert cached >= warmed.usage.input_tokens // 2
    assert answer.output_text

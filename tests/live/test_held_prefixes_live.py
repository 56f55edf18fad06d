"""A conversation's second turn, with real weights: fewer blocks cross, and the text is the same."""

import asyncio
import re
from typing import Any

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack, Process

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

STORY = """The lighthouse keeper wrote in his journal every evening. He counted the ships: one, two,
three, four, five; the sixth was late. On Sundays the priest came by boat, and they argued about the
weather, about the price of oil, and about whether a light that nobody sees is still a light. """
_BLOCKS = re.compile(r'^diptych_kv_handed_over_blocks_total\{how="(\w+)"\} (\S+)', re.M)


async def said(stack: LiveStack, messages: list[dict[str, str]]) -> str:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "temperature": 0}
    remote = {"diptych": {"mode": "remote"}}
    async with openai.AsyncOpenAI(
        base_url=stack.base_url, api_key="none", max_retries=0, timeout=120
    ) as client:
        answer = await client.chat.completions.create(**asked, messages=messages, extra_body=remote)
    return answer.choices[0].message.content or ""


async def blocks(prefill: Process) -> dict[str, int]:
    page = (await asyncio.to_thread(prefill.page, "/metrics")).decode()
    return {how: round(float(count)) for how, count in _BLOCKS.findall(page)}


async def test_a_second_turn_brings_less_and_says_the_same(own_stack: LiveStack) -> None:
    await asyncio.to_thread(own_stack.start_all, {"KV_REUSE": "true"})
    prefill = own_stack.of("prefill-worker")
    turn = [{"role": "user", "content": STORY * 3 + "What did the priest say?"}]
    turn.append({"role": "assistant", "content": await said(own_stack, turn)})
    first = await blocks(prefill)
    assert first["held"] == 0
    assert first["sent"] >= 4
    turn.append({"role": "user", "content": "And what did the keeper answer him?"})
    text = await said(own_stack, turn)
    second = await blocks(prefill)
    # The template may say the answer in other tokens: then the blocks before it are held.
    assert second["held"] >= first["sent"] - 1
    assert second["sent"] - first["sent"] < first["sent"]
    own_stack.of("decode-worker").kill()
    fresh = own_stack.start("decode-worker")
    await asyncio.to_thread(fresh.wait_ready)
    await asyncio.to_thread(own_stack.wait_for_model)
    assert await said(own_stack, turn) == text
    assert (await blocks(prefill))["held"] == second["held"]

"""A prefill worker is killed; the next restores what it had written, and the text is the same."""

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack, Process

pytestmark = [pytest.mark.live, pytest.mark.timeout(1500)]

STORY = """The lighthouse keeper wrote in his journal every evening. He counted the ships: one, two,
three, four, five; the sixth was late. On Sundays the priest came by boat, and they argued about the
weather, about the price of oil, and about whether a light that nobody sees is still a light. """
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 1.0, "seed": 7}
WAIT_S = 120.0
_STORED = re.compile(r'^diptych_kv_tier_writes_total\{[^}]*outcome="stored"[^}]*\} (\S+)', re.M)


def asked(sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": STORY * 5 + "What did the priest say?"}],
        "max_tokens": 24,
        **sampling,
    }


async def answer(stack: LiveStack, sampling: dict[str, Any]) -> tuple[str, Any]:
    async with openai.AsyncOpenAI(
        base_url=stack.base_url, api_key="none", max_retries=0, timeout=240
    ) as client:
        said = await client.chat.completions.create(**asked(sampling))
    assert said.usage is not None
    return said.choices[0].message.content or "", said.usage


def cached(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


async def until_stored(worker: Process, blocks: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            page = (await asyncio.to_thread(worker.page, "/metrics")).decode()
            if sum(float(count) for count in _STORED.findall(page)) >= blocks:
                return
            await asyncio.sleep(0.05)


async def test_a_killed_prefill_workers_kv_is_restored_by_the_next(
    own_stack: LiveStack, tmp_path: Path
) -> None:
    tiers = {"KV_TIERS": f"host:64MiB,disk:1GiB:{tmp_path / 'kv'}", "KV_RESTORE": "always"}
    await asyncio.to_thread(own_stack.start_all, tiers)
    greedy, usage = await answer(own_stack, GREEDY)
    assert cached(usage) == 0
    full = usage.prompt_tokens // 64
    assert full >= 4
    seeded, _ = await answer(own_stack, SEEDED)  # the second sighting of the prompt's blocks
    victim = own_stack.of("prefill-worker")
    await until_stored(victim, 2 * full)  # in either tier
    victim.kill()
    # Without a prefix cache of its own nothing but the tiers can give it KV.
    fresh = own_stack.start("prefill-worker", **tiers, PREFIX_CACHE="false")
    await asyncio.to_thread(fresh.wait_ready)
    await asyncio.to_thread(own_stack.wait_for_model)
    for sampling, cold in ((GREEDY, greedy), (SEEDED, seeded)):
        assert await restored(own_stack, sampling) == cold


async def restored(stack: LiveStack, sampling: dict[str, Any]) -> str:
    """An answer of which all prefill was restored: a disk too busy to answer is a miss."""
    async with asyncio.timeout(WAIT_S):
        while True:
            text, usage = await answer(stack, sampling)
            whole = (usage.prompt_tokens - 1) // 64 * 64
            if usage.model_extra["diptych"]["mode"] == "remote" and cached(usage) == whole:
                return text

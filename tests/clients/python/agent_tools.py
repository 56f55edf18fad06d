"""`openai-agents` with a tool that it must call first; prints what happened as JSON."""

import asyncio
import json
import os
from typing import Literal

from agents import Agent, ModelSettings, RunConfig, Runner, function_tool
from agents.models.openai_provider import OpenAIProvider

called: list[str] = []


@function_tool
def get_weather(city: Literal["Paris", "Rome"], day: Literal["today", "tomorrow"]) -> str:
    """Tells the weather of a city."""
    called.append(f"{city} {day}")
    return "sunny"


async def loop(transport: str) -> None:
    provider = OpenAIProvider(
        base_url=os.environ["DIPTYCH_URL"],
        api_key="none",
        use_responses_websocket=transport == "websocket",
    )
    config = RunConfig(model_provider=provider, tracing_disabled=True)
    # Once a tool was called, the next turn may choose (`reset_tool_choice`).
    settings = ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
    agent = Agent(
        name="helper",
        instructions="You are a helpful assistant.",
        model=os.environ["DIPTYCH_MODEL"],
        model_settings=settings,
        tools=[get_weather],
    )
    question = "What is the weather in Paris?"
    whole = await Runner.run(agent, question, run_config=config, max_turns=6)
    tell(whole)
    called.clear()
    streamed = Runner.run_streamed(agent, question, run_config=config, max_turns=6)
    async for _ in streamed.stream_events():
        pass
    tell(streamed)
    await provider.aclose()


def tell(result: object) -> None:
    kinds = [item.type for item in result.new_items]
    told = {"text": result.final_output, "items": kinds, "called": list(called)}
    print(json.dumps(told), flush=True)


asyncio.run(loop(os.environ["TRANSPORT"]))

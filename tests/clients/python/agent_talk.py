"""`openai-agents` without tools: two turns whole, two as a stream, over the transport named.

Prints one JSON object per turn.
"""

import asyncio
import json
import os

from agents import Agent, ModelSettings, RunConfig, Runner, SQLiteSession
from agents.models.openai_provider import OpenAIProvider

ASKED = "What is the capital of France?"


async def talk(transport: str) -> None:
    provider = OpenAIProvider(
        base_url=os.environ["DIPTYCH_URL"],
        api_key="none",
        use_responses_websocket=transport == "websocket",
    )
    config = RunConfig(model_provider=provider, tracing_disabled=True)
    agent = Agent(
        name="helper",
        instructions="You are a helpful assistant.",
        model=os.environ["DIPTYCH_MODEL"],
        model_settings=ModelSettings(temperature=0, max_tokens=32),
    )
    whole = await Runner.run(agent, ASKED, run_config=config)
    tell(whole, text=whole.final_output)
    going_on = await Runner.run(
        agent, ASKED, run_config=config, previous_response_id=whole.last_response_id
    )
    tell(going_on, text=going_on.final_output)
    session = SQLiteSession("here")
    for _ in range(2):
        streamed = Runner.run_streamed(agent, ASKED, run_config=config, session=session)
        text = ""
        async for event in streamed.stream_events():
            data = getattr(event, "data", None)
            if data is not None and data.type == "response.output_text.delta":
                text += data.delta
        assert text == streamed.final_output
        tell(streamed, text=text)
    await provider.aclose()


def tell(result: object, *, text: str) -> None:
    (response,) = result.raw_responses
    told = {
        "text": text,
        "response_id": response.response_id,
        "input_tokens": response.usage.input_tokens,
    }
    print(json.dumps(told), flush=True)


asyncio.run(talk(os.environ["TRANSPORT"]))

"""What clients write is in no log, and in no span unless an operator wants it there."""

import json
import logging
from typing import Any

import pytest
from websockets.asyncio.client import connect

from diptych_contracts.journal import EndReason
from diptych_telemetry import recorded_spans

SECRET = "xyzzy-my-heart-condition"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SAID = [{"role": "user", "content": SECRET}]


async def answer(fleet: Any, request: Any) -> None:
    fleet.say(request, fleet.ids(SECRET), end=EndReason.STOP)


async def fail(fleet: Any, request: Any) -> None:
    fleet.say(request, fleet.ids(SECRET))
    fleet.say(request, [], index=len(fleet.ids(SECRET)), end=EndReason.FAILED)


def told(record: list[logging.LogRecord], printed: Any, spans: Any) -> str:
    """Everything that was logged or traced."""
    lines = [r.getMessage() + str(r.exc_info) for r in record]
    traces = [span.to_json() for span in spans.get_finished_spans()]
    return "\n".join([*lines, printed.out, printed.err, *traces])


@pytest.mark.parametrize("script", [answer, fail])
async def test_nothing_is_told_of_what_was_said(
    run_stack: Any, script: Any, caplog: Any, capsys: Any
) -> None:
    caplog.set_level(logging.WARNING)  # of libraries no more reaches our log, see `telemetry`
    with recorded_spans() as spans:
        async with run_stack(script) as stack:
            await ask_everywhere(stack)
        found = told(caplog.records, capsys.readouterr(), spans)
        assert "request_ended" in found
        assert "gateway.accept" in found
        assert SECRET not in found
        assert SECRET.encode().hex() not in found


async def ask_everywhere(stack: Any) -> None:
    client = stack.client
    notes = {"user": SECRET, "metadata": {"note": SECRET}, "prompt_cache_key": SECRET}
    for path, body in [
        (CHAT, stack.body(messages=SAID, stop=[f"{SECRET}!"], **notes)),
        (CHAT, stack.body(messages=SAID, stream=True)),
        (CHAT, stack.body(messages=[{"role": SECRET, "content": SECRET}])),
        (CHAT, stack.body(messages=SAID, temperature=SECRET)),
        (CHAT, stack.body(messages=SAID, **{SECRET: SECRET})),
        (CHAT, stack.body(messages=SAID, response_format={"type": SECRET})),
        (CHAT, stack.body(messages=SAID, max_tokens=9999)),
        (CHAT, stack.body(messages=[{"role": "user", "content": SECRET * 60_000}])),
        (RESPONSES, stack.asked(input=SECRET, instructions=SECRET, **notes)),
        (RESPONSES, stack.asked(input=SECRET, stream=True)),
        (RESPONSES, stack.asked(input=SECRET, previous_response_id=SECRET)),
        (RESPONSES, stack.asked(input=[{"type": SECRET}])),
        ("/tokenize", {"model": "tiny", "prompt": SECRET}),
        ("/tokenize", {"model": "tiny", "prompt": SECRET * 60_000}),
        ("/v1/embeddings", {"model": "tiny", "input": SECRET}),
    ]:
        await client.post(path, json=body)
    await client.post(CHAT, content=f'{{"{SECRET}'.encode())
    await client.get(f"{RESPONSES}/{SECRET}", params={SECRET: SECRET})
    await client.get("/v1/models", headers={"authorization": f"Bearer {SECRET}"})
    await client.get(f"/{SECRET}")
    socket = stack.base_url.replace("http", "ws")
    for path in ("responses", "chat/completions"):
        async with connect(f"{socket}/{path}?token={SECRET}") as connection:
            frames: list[Any] = [
                stack.body(messages=SAID) if "chat" in path else stack.asked(input=SECRET),
                {"type": "response.create", **stack.asked(input=SECRET, generate=False)},
                {"type": SECRET},
                SECRET,
            ]
            for frame in frames:
                await connection.send(json.dumps(frame))
                await connection.recv()
            await connection.send(SECRET.encode())
            await connection.recv()


async def test_an_operator_may_want_to_read_prompts(run_stack: Any, capsys: Any) -> None:
    with recorded_spans() as spans:
        async with run_stack(answer, record_prompts=True) as stack:
            await stack.chat(messages=SAID)
        (accepted,) = [s for s in spans.get_finished_spans() if s.name == "gateway.accept"]
        said = json.loads(accepted.attributes["gen_ai.input.messages"])
        assert said == [{"role": "user", "parts": [{"type": "text", "content": SECRET}]}]
    assert SECRET not in capsys.readouterr().out

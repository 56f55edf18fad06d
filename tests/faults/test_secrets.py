"""What clients write and what lets them in stands in no log, span or metric of any service."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from diptych_bus.memory import MemoryBroker
from diptych_contracts.fleet import Role
from diptych_telemetry import metrics, recorded_spans
from diptych_testkit.builders import MODEL
from diptych_testkit.keys import put_key
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.small_gateway import VOCAB_SIZE, SmallGateway, small_gateway
from diptych_testkit.toy_engine import ToyStepEngine

SECRET = "xylophone"
"""Marks everything that is nobody's business."""
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {SECRET: {"type": "string", "description": SECRET}}}
TOOL = {"name": f"f_{SECRET}", "description": SECRET, "parameters": SCHEMA}
CALL = {"name": TOOL["name"], "arguments": json.dumps({SECRET: SECRET})}


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    """Every event of ours, whatever its level."""
    with structlog.testing.capture_logs() as events:
        yield events


def bodies() -> list[tuple[str, dict[str, Any]]]:
    said = {"role": "user", "content": f"Say {SECRET}."}
    called = {"role": "assistant", "tool_calls": [{"id": "c1", "function": CALL}]}
    result = {"role": "tool", "tool_call_id": "c1", "content": SECRET}
    some: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
    wanted = {"type": "json_schema", "json_schema": {"name": SECRET, "schema": SCHEMA}}
    tools = [{"type": "function", "function": TOOL}]
    return [
        (CHAT, {**some, "messages": [said, called, result], "tools": tools, "stop": SECRET}),
        (CHAT, {**some, "messages": [said], "response_format": wanted, "user": SECRET}),
        (CHAT, {**some, "messages": [said], "metadata": {SECRET: SECRET}, "stream": True}),
        (RESPONSES, {"model": MODEL, "input": SECRET, "instructions": SECRET, "metadata": {}}),
        # Refused, each at another place.
        (CHAT, {**some, "messages": [{"role": SECRET, "content": SECRET}]}),
        (CHAT, {**some, "messages": [said], SECRET: SECRET}),
        (CHAT, {**some, "messages": [said], "model": SECRET}),
        (CHAT, {**some, "messages": [said], "tools": [{"type": SECRET}]}),
        (CHAT, {**some, "messages": [said], "response_format": {"type": SECRET}}),
        (CHAT, {**some, "messages": [said], "tool_choice": SECRET, "tools": tools}),
        (CHAT, {**some, "messages": [{**said, "content": SECRET * 400}]}),
    ]


async def start(fleet: SmallFleet) -> None:
    fleet.scheduler()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        fleet.worker(name, role, engine=ToyStepEngine(vocab_size=VOCAB_SIZE))
    await fleet.ready("s1", "p", "d")


async def ask_all(gateway: SmallGateway, key: str) -> list[int]:
    client, statuses = gateway.client, []
    for shown in (f"Bearer {key}", f"Bearer {SECRET}", SECRET):
        headers = {"authorization": shown, "baggage": f"a={SECRET};{SECRET}", "x-a": SECRET}
        for path, body in bodies():
            answer = await client.post(f"{path}?{SECRET}={SECRET}", json=body, headers=headers)
            statuses.append(answer.status_code)
        broken = f'{{"model": "{SECRET}'.encode()
        statuses.append((await client.post(CHAT, content=broken, headers=headers)).status_code)
    return statuses


async def test_a_marked_secret_is_found_nowhere(
    logged: list[Any], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with recorded_spans() as spans:
        async with small_fleet(MemoryBroker()) as fleet, small_gateway(fleet, "g1") as gateway:
            await start(fleet)
            key = await put_key(fleet.bus, "k1")
            statuses = await ask_all(gateway, key)
            told = metrics.render().decode()
        finished = [(s.name, s.attributes, s.events, s.status) for s in spans.get_finished_spans()]
    assert {200, 400, 401, 404} <= set(statuses), statuses
    assert {"gateway.accept", "scheduler.route", "decode.run"} <= {name for name, *_ in finished}
    texts = {
        "logs": [repr(event) for event in logged],
        "libraries": [r.getMessage() for r in caplog.records if r.name != "httpx"],  # the client
        "spans": [repr(span) for span in finished],
        "metrics": told.splitlines(),
        "output": capfd.readouterr(),
    }
    assert texts["logs"]
    for where, lines in texts.items():
        found = [line for line in lines if SECRET in line or key in line]
        assert not found, (where, found)

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych_cli import stack, welcome


def plan(**changes: Any) -> stack.Plan:
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 8080,
        "nats_port": 4333,
        "model": "m",
        "model_path": Path("/w/m.gguf"),
    }
    return stack.Plan(**(values | changes))


def names(stages: stack.Stages) -> list[list[str]]:
    return [[spec.name for spec in stage] for stage in stages]


def test_nats_comes_first_and_the_gateway_last() -> None:
    assert names(stack.stages(plan(), ("nats-server",))) == [
        ["nats"],
        ["prefill-worker", "decode-worker", "scheduler", "power-governor"],
        ["gateway"],
    ]


def test_replicas_have_names_of_their_own() -> None:
    behind = names(stack.stages(plan(prefill=2, decode=3), ("nats-server",)))[1]
    assert behind[:5] == [
        "prefill-worker",
        "prefill-worker-2",
        "decode-worker",
        "decode-worker-2",
        "decode-worker-3",
    ]


def test_a_child_is_tethered_and_told_its_settings() -> None:
    (worker,) = (
        spec
        for spec in stack.stages(plan(threads=3), ("nats-server",))[1]
        if spec.name == "decode-worker"
    )
    tether = (sys.executable, "-m", "diptych_chassis.tether", str(os.getpid()), "--")
    assert worker.command == (*tether, sys.executable, "-m", "diptych_decode_worker")
    assert worker.environment == {
        "DIPTYCH_ALL__NATS_URL": "nats://127.0.0.1:4333",
        "DIPTYCH_ALL__LOG_FORMAT": "json",
        "DIPTYCH_ALL__LOG_LEVEL": "info",
        "DIPTYCH_ALL__DRAIN_S": "4",
        "DIPTYCH_DECODE_WORKER__MODEL": "m",
        "DIPTYCH_DECODE_WORKER__MODEL_PATH": "/w/m.gguf",
        "DIPTYCH_DECODE_WORKER__THREADS": "3",
    }


def test_the_gateway_is_told_where_to_listen() -> None:
    (gateway,) = stack.stages(plan(port=9000), ("nats-server",))[2]
    assert gateway.environment["DIPTYCH_GATEWAY__PORT"] == "9000"
    assert gateway.environment["DIPTYCH_GATEWAY__HOST"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8080/v1"), ("::1", "http://[::1]:8080/v1")],
)
def test_the_address_can_be_pasted(host: str, url: str) -> None:
    assert plan(host=host).base_url == url


def test_the_welcome_holds_commands_that_work_as_they_stand() -> None:
    text = welcome.text(plan(), 3.14)
    assert "Diptych serves m at http://127.0.0.1:8080/v1 (ready in 3.1 s)" in text
    assert "curl -N http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type" in text
    assert '"content": "What is the capital of France?"' in text
    assert "DIPTYCH_ALL__NATS_URL=nats://127.0.0.1:4333" in text
    assert "DIPTYCH_DECODE_WORKER__MODEL_PATH=/w/m.gguf" in text
    assert text.rstrip().endswith("Stop with Ctrl-C.")

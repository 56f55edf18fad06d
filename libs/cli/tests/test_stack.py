import os
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych_chassis import ending
from diptych_cli import stack, supervising, welcome


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
    return [[spec.service for spec in stage] for stage in stages]


def test_nats_comes_first_and_the_gateway_last() -> None:
    assert names(stack.stages(plan(), ("nats-server",))) == [
        ["nats"],
        ["prefill-worker", "decode-worker", "scheduler", "power-governor"],
        ["gateway"],
    ]


def test_so_many_of_each_are_wanted() -> None:
    assert stack.counts(plan(prefill=0, decode=3, gateways=2)) == {
        "prefill-worker": 0,
        "decode-worker": 3,
        "gateway": 2,
        "scheduler": 1,
    }


def test_who_leaves_is_killed_only_after_its_own_drain() -> None:
    assert stack.DRAIN_S + ending.CUT_OFF_S < supervising.KILL_LEAVING_AFTER_S
    assert ending.QUICK_S + ending.CUT_OFF_S < supervising.KILL_AFTER_S


def test_a_child_is_tethered_and_told_its_settings() -> None:
    (worker,) = (
        spec
        for spec in stack.stages(plan(threads=3), ("nats-server",))[1]
        if spec.service == "decode-worker"
    )
    tether = (sys.executable, "-m", "diptych_chassis.tether", str(os.getpid()), "--")
    assert worker.command == (*tether, sys.executable, "-m", "diptych_decode_worker")
    assert worker.environment == {
        "DIPTYCH_ALL__NATS_URL": "tls://127.0.0.1:4333",
        "DIPTYCH_ALL__TRUST": "trust.pem",
        "DIPTYCH_ALL__LOG_FORMAT": "json",
        "DIPTYCH_ALL__LOG_LEVEL": "info",
        "DIPTYCH_ALL__DRAIN_S": "60",
        "DIPTYCH_DECODE_WORKER__MODEL": "m",
        "DIPTYCH_DECODE_WORKER__MODEL_PATH": "/w/m.gguf",
        "DIPTYCH_DECODE_WORKER__THREADS": "3",
    }


def test_the_gateway_is_told_where_to_listen() -> None:
    (gateway,) = stack.stages(plan(port=9000), ("nats-server",))[2]
    assert gateway.environment["DIPTYCH_GATEWAY__PORT"] == "9000"
    assert gateway.environment["DIPTYCH_GATEWAY__HOST"] == "127.0.0.1"
    assert gateway.environment["DIPTYCH_GATEWAY__REUSE_PORT"] == "true"


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
    assert "DIPTYCH_ALL__NATS_URL=tls://127.0.0.1:4333" in text
    assert "DIPTYCH_DECODE_WORKER__MODEL_PATH=/w/m.gguf" in text
    assert text.rstrip().endswith("Stop with Ctrl-C.")

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych_bus.server import NatsServer
from diptych_testkit.ports import free_port

PROGRAM = """
import asyncio, os, sys
from diptych_chassis.running import run
from diptych_chassis.settings import ServiceSettings, read_settings
from diptych_contracts.errors import Permanent

async def serve(member):
    {body}

settings = read_settings(ServiceSettings, "gateway", os.environ)
sys.exit(run("gateway", settings, serve))
"""
SERVE = "member.ready(True); await member.stopping.wait()"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", port=free_port())
    server.start_blocking()
    yield server
    server.stop_blocking()


class Service:
    """A service in a process of its own, and its log."""

    def __init__(self, body: str, **settings: str) -> None:
        environment = {f"DIPTYCH_GATEWAY__{name.upper()}": v for name, v in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(body=body)],
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        self.lines: list[dict[str, Any]] = []

    def until(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line))
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        raise AssertionError(f"no {event} in {self.lines}")

    def ended(self) -> int:
        assert self.process.stderr is not None
        self.lines += [json.loads(line) for line in self.process.stderr]
        code = self.process.wait(60)
        self.process.stderr.close()
        return code

    def named(self, event: str) -> dict[str, Any]:
        return next(line for line in self.lines if line["event"] == event)


def probe(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.read()


def test_a_life_ends_cleanly_when_asked(server: NatsServer) -> None:
    service = Service(SERVE, nats_url=server.url)
    port = service.until("service_started")["health_port"]
    assert probe(port, "/health/live")[0] == 200
    status, body = probe(port, "/health/ready")
    assert (status, json.loads(body)["incarnation"]) == (200, service.lines[0]["incarnation"])
    assert b"diptych_ready 1.0" in probe(port, "/metrics")[1]
    service.process.send_signal(signal.SIGTERM)
    assert service.ended() == 0
    assert [line["event"] for line in service.lines[-2:]] == ["service_stopping", "service_stopped"]


def test_probes_say_why_it_is_not_ready(server: NatsServer) -> None:
    body = "member.ready(False, 'loading'); await member.stopping.wait()"
    service = Service(body, nats_url=server.url)
    port = service.until("service_started")["health_port"]
    status, answer = probe(port, "/health/ready")
    assert (status, json.loads(answer)["ok"]) == (503, False)
    service.process.send_signal(signal.SIGINT)
    assert service.ended() == 0


def test_a_hung_main_loop_is_not_live(server: NatsServer) -> None:
    service = Service("import time; member.ready(True); time.sleep(60)", nats_url=server.url)
    port = service.until("service_started")["health_port"]
    deadline_s = time.monotonic() + 60
    while probe(port, "/health/live")[0] == 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert probe(port, "/health/ready")[0] == 503
    service.process.kill()
    service.ended()


def test_losing_the_bus_is_told_and_survived(server: NatsServer) -> None:
    service = Service(SERVE, nats_url=server.url)
    service.until("service_started")
    server.kill_blocking()
    assert service.until("bus_away")["level"] == "warning"
    server.start_blocking()
    service.until("bus_returned")
    service.process.send_signal(signal.SIGTERM)
    assert service.ended() == 0


def test_a_bus_that_is_not_there_is_one_line_and_another_try() -> None:
    service = Service(SERVE, nats_url="nats://127.0.0.1:9", bus_wait_s="0.2")
    assert service.ended() == 1
    told = service.named("start_failed")
    assert told["error"] == "BusAway"
    assert "nats://127.0.0.1:9" in told["reason"]
    assert "exception" not in told


def test_what_can_never_work_is_one_line_and_exit_code_two(server: NatsServer) -> None:
    service = Service("raise Permanent('expected a GGUF file, got a cat')", nats_url=server.url)
    assert service.ended() == 2
    told = service.named("start_failed")
    assert told["reason"] == "expected a GGUF file, got a cat"


def test_a_taken_health_port_is_one_line(server: NatsServer) -> None:
    service = Service(SERVE, nats_url=server.url, health_port=str(server.port))
    assert service.ended() == 1
    assert f"cannot listen on 127.0.0.1:{server.port}" in service.named("start_failed")["reason"]


def test_a_bug_is_one_line_with_its_traceback(server: NatsServer) -> None:
    service = Service("member.ready(True); raise KeyError('x')", nats_url=server.url)
    assert service.ended() == 1
    told = service.named("service_failed")
    assert (told["level"], told["error"]) == ("error", "KeyError")
    assert "KeyError" in told["exception"]


def test_a_handler_with_a_bug_ends_the_process(server: NatsServer) -> None:
    body = "await member.bus.subscribe('beat.*', lambda _: {}['x']); await member.stopping.wait()"
    service = Service("member.ready(True); " + body, nats_url=server.url)
    assert service.ended() == 1
    assert service.named("service_failed")["error"] == "KeyError"


def test_a_process_that_still_waits_for_its_bus_ends_at_once() -> None:
    service = Service(SERVE, nats_url="nats://127.0.0.1:9")
    service.until("service_connecting")
    began_s = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    code = service.ended()
    assert (code, time.monotonic() - began_s < 20) == (0, True)


def test_a_stop_that_takes_too_long_is_cut_off(server: NatsServer) -> None:
    service = Service("member.ready(True); await asyncio.sleep(60)", nats_url=server.url)
    service.until("service_started")
    service.process.send_signal(signal.SIGTERM)
    service.until("service_stopping")
    service.process.send_signal(signal.SIGTERM)  # asked twice: at once
    assert service.ended() == 1
    assert service.named("stop_cut_off")["level"] == "error"


@pytest.mark.parametrize(("number", "drain_s"), [(signal.SIGTERM, 30.0), (signal.SIGINT, 4.0)])
def test_a_person_at_the_keyboard_need_not_wait_for_a_long_drain(
    number: signal.Signals, drain_s: float, server: NatsServer
) -> None:
    body = (
        "member.ready(True); await member.stopping.wait(); "
        "raise AssertionError(member.stopping.drain_s(30.0))"
    )
    service = Service(body, nats_url=server.url)
    service.until("service_started")
    service.process.send_signal(number)
    service.ended()
    assert f"AssertionError: {drain_s}" in service.named("service_failed")["exception"]

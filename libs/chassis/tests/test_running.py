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

from diptych_identity import identity
from diptych_identity.roles import Role
from diptych_testkit.guarded_nats import GuardedNats, guarded_nats

PROGRAM = """
import asyncio, os, sys, time
from diptych_chassis.running import run
from diptych_chassis.settings import ServiceSettings, read_settings
from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Beat

async def deaf():
    for _ in range(3):  # as a library that tries again for ever does
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

async def serve(member):
    {body}

settings = read_settings(ServiceSettings, "gateway", os.environ)
sys.exit(run("gateway", settings, serve))
"""
SERVE = "member.ready(True); await member.stopping.wait()"


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[GuardedNats]:
    with guarded_nats(tmp_path) as bus:
        yield bus


class Service:
    """A service in a process of its own, and its log."""

    def __init__(self, body: str, bus: GuardedNats, **settings: str) -> None:
        environment = bus.environment("gateway") | {
            f"DIPTYCH_GATEWAY__{name.upper()}": v for name, v in settings.items()
        }
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
        with self.process:  # waits, and closes what it says
            said = self.process.stderr.read()
        self.lines += [json.loads(line) for line in said.splitlines()]
        return self.process.returncode

    def named(self, event: str) -> dict[str, Any]:
        return next(line for line in self.lines if line["event"] == event)


def probe(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.read()


def test_a_life_ends_cleanly_when_asked(bus: GuardedNats) -> None:
    service = Service(SERVE, bus)
    port = service.until("service_started")["health_port"]
    assert probe(port, "/health/live")[0] == 200
    deadline_s = time.monotonic() + 60
    while (answer := probe(port, "/health/ready"))[0] != 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert json.loads(answer[1])["incarnation"] == service.lines[0]["incarnation"]
    assert b"diptych_ready 1.0" in probe(port, "/metrics")[1]
    service.process.send_signal(signal.SIGTERM)
    assert service.ended() == 0
    assert [line["event"] for line in service.lines[-2:]] == ["service_stopping", "service_stopped"]


def test_probes_say_why_it_is_not_ready(bus: GuardedNats) -> None:
    body = "member.ready(False, 'loading'); await member.stopping.wait()"
    service = Service(body, bus)
    port = service.until("service_started")["health_port"]
    status, answer = probe(port, "/health/ready")
    assert (status, json.loads(answer)["ok"]) == (503, False)
    service.process.send_signal(signal.SIGINT)
    assert service.ended() == 0


@pytest.mark.parametrize(("said", "last"), [("True", "stopped"), ("False, 'drained'", "drained")])
def test_who_said_why_it_is_not_ready_says_so_to_its_end(
    bus: GuardedNats, said: str, last: str
) -> None:
    at_exit = "lambda: os.write(2, json.dumps(dict(event=member.vitals.readiness.detail)).encode())"
    body = f"import atexit, json; atexit.register({at_exit}); member.ready({said})"
    service = Service(body, bus)
    assert service.ended() == 0
    assert service.lines[-1]["event"] == last


def test_a_hung_main_loop_is_not_live(bus: GuardedNats) -> None:
    service = Service("import time; member.ready(True); time.sleep(600)", bus)
    port = service.until("service_started")["health_port"]
    deadline_s = time.monotonic() + 60
    while probe(port, "/health/live")[0] == 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert probe(port, "/health/ready")[0] == 503
    service.process.kill()
    service.ended()


def test_losing_the_bus_is_told_and_survived(bus: GuardedNats) -> None:
    service = Service(SERVE, bus)
    service.until("service_started")
    bus.server.kill_blocking()
    assert service.until("bus_away")["level"] == "warning"
    bus.server.start_blocking()
    service.until("bus_returned")
    service.process.send_signal(signal.SIGTERM)
    assert service.ended() == 0


def test_a_bus_that_is_not_there_is_one_line_and_another_try(bus: GuardedNats) -> None:
    service = Service(SERVE, bus, nats_url="tls://127.0.0.1:9", bus_wait_s="0.2")
    assert service.ended() == 1
    told = service.named("start_failed")
    assert told["error"] == "BusAway"
    assert "tls://127.0.0.1:9" in told["reason"]
    assert "exception" not in told


def test_what_can_never_work_is_one_line_and_exit_code_two(bus: GuardedNats) -> None:
    service = Service("raise Permanent('expected a GGUF file, got a cat')", bus)
    assert service.ended() == 2
    told = service.named("start_failed")
    assert told["reason"] == "expected a GGUF file, got a cat"


def test_a_taken_health_port_is_one_line(bus: GuardedNats) -> None:
    service = Service(SERVE, bus, health_port=str(bus.server.port))
    assert service.ended() == 1
    assert (
        f"cannot listen on 127.0.0.1:{bus.server.port}" in service.named("start_failed")["reason"]
    )


def test_a_bug_is_one_line_with_its_traceback(bus: GuardedNats) -> None:
    service = Service("member.ready(True); raise KeyError('x')", bus)
    assert service.ended() == 1
    told = service.named("service_failed")
    assert (told["level"], told["error"]) == ("error", "KeyError")
    assert "KeyError" in told["exception"]


def test_a_handler_with_a_bug_ends_the_process(bus: GuardedNats) -> None:
    mine = "'attended.' + member.incarnation"
    body = (
        f"await member.bus.subscribe({mine}, lambda _: {{}}['x']); "
        f"await member.bus.publish({mine}, Beat(member='a', service='b', count=1)); "
        "await member.stopping.wait()"
    )
    service = Service("member.ready(True); " + body, bus)
    assert service.ended() == 1
    assert service.named("service_failed")["error"] == "KeyError"


def test_a_process_that_still_waits_for_its_bus_ends_at_once(bus: GuardedNats) -> None:
    service = Service(SERVE, bus, nats_url="tls://127.0.0.1:9", bus_wait_s="3600")
    service.until("service_connecting")
    service.process.send_signal(signal.SIGTERM)
    assert service.ended() == 0


def test_a_stop_that_takes_too_long_is_cut_off(bus: GuardedNats) -> None:
    service = Service("member.ready(True); await asyncio.sleep(600)", bus)
    service.until("service_started")
    service.process.send_signal(signal.SIGTERM)
    service.until("service_stopping")
    service.process.send_signal(signal.SIGTERM)  # asked twice: at once
    assert service.ended() == 1
    assert service.named("stop_cut_off")["level"] == "error"


LEFT = "global left; left = asyncio.create_task({}); await asyncio.sleep(600)"


@pytest.mark.parametrize(
    "body",
    [
        "async with asyncio.TaskGroup() as group: group.create_task(deaf())",
        LEFT.format("deaf()"),
        LEFT.format("asyncio.to_thread(time.sleep, 1)"),
    ],
    ids=["of a group", "forgotten", "a thread, forgotten"],
)
def test_a_stop_whose_cancellation_is_swallowed_is_insisted_on(bus: GuardedNats, body: str) -> None:
    """A task that hears only its third cancellation, or a thread that hears none."""
    quick = "from diptych_chassis import ending; ending.INSIST_S = 0.1; member.ready(True)\n    "
    service = Service(quick + body, bus)
    service.until("service_started")
    service.process.send_signal(signal.SIGTERM)
    service.until("service_stopping")
    service.process.send_signal(signal.SIGTERM)
    assert service.ended() == 1
    assert service.named("stop_insisted")["level"] == "warning"


@pytest.mark.parametrize(("number", "drain_s"), [(signal.SIGTERM, 30.0), (signal.SIGINT, 4.0)])
def test_a_person_at_the_keyboard_need_not_wait_for_a_long_drain(
    number: signal.Signals, drain_s: float, bus: GuardedNats
) -> None:
    body = (
        "member.ready(True); await member.stopping.wait(); "
        "raise AssertionError(member.stopping.drain_s(30.0))"
    )
    service = Service(body, bus)
    service.until("service_started")
    service.process.send_signal(number)
    service.ended()
    assert f"AssertionError: {drain_s}" in service.named("service_failed")["exception"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"identity": ""}, "DIPTYCH_GATEWAY__IDENTITY must be set"),
        ({"nats_url": "nats://127.0.0.1:4222"}, "expected tls://HOST:PORT"),
        ({"identity": "/nowhere"}, "cannot read the identity /nowhere"),
        ({"trust": "/nowhere"}, "cannot read what to trust from /nowhere"),
    ],
)
def test_there_is_no_way_in_without_an_identity(
    bus: GuardedNats, settings: dict[str, str], reason: str
) -> None:
    service = Service(SERVE, bus, **settings)
    assert service.ended() == 2
    assert reason in service.named("start_failed")["reason"]


def test_another_role_s_identity_is_refused(bus: GuardedNats) -> None:
    service = Service(SERVE, bus, identity=str(bus.issue(Role.SCHEDULER)))
    assert service.ended() == 2
    assert "is of a scheduler, expected a gateway" in service.named("start_failed")["reason"]


def test_a_revoked_process_ends(bus: GuardedNats) -> None:
    path = bus.issue(Role.GATEWAY)
    service = Service(SERVE, bus, identity=str(path))
    service.until("service_started")
    bus.authority.revoke_identity(identity.read(path))
    bus.reload()
    assert service.ended() == 1
    assert "refuses this process's identity" in service.named("service_failed")["exception"]

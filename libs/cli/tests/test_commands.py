import builtins
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych_cli import commands, up
from diptych_cli.failing import CliError, need
from diptych_testkit.ports import free_port


def ask(*arguments: str) -> int:
    try:
        return commands.main(arguments)
    except SystemExit as err:
        return int(err.code or 0)


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        ((), ["diptych up ", "diptych doctor", "diptych models list"]),
        (("--help",), ["diptych up ", "diptych doctor", "diptych models list"]),
        (("up", "--help"), ["diptych up --port 9000 --decode 2", "Ctrl-C", "--threads"]),
        (("scale", "--help"), ["diptych scale decode 3", "no request is lost"]),
        (("chat", "--help"), ["diptych chat --url", "Ctrl-C stops an answer"]),
        (("batch", "--help"), ["diptych batch lines.jsonl > results.jsonl", "Exit code 1"]),
        (("top", "--help"), ["diptych top --once"]),
        (("tap", "--help"), ["diptych tap 'event.>' --count 1", "unless --all"]),
        (("kv", "--help"), ["diptych kv --ended 10", "diptych kv --json"]),
        (("dead", "--help"), ["diptych dead retry --all", "an id of its own"]),
        (("dead",), ["diptych dead list"]),
        (("keys", "--help"), ["diptych keys create --name laptop", "stored as a hash"]),
        (("keys",), ["diptych keys revoke 5f0c --forget"]),
        (("keys", "create", "--help"), ["--tenant", "--expires", "--requests-per-minute"]),
        (("tenants", "--help"), ["diptych tenants limit acme --requests-per-minute 600"]),
        (("tenants",), ["diptych tenants list"]),
        (("usage", "--help"), ["diptych usage --tenant acme --since 2026-01-01"]),
        (("models", "--help"), ["diptych models pull smollm2-135m", "OWNER/REPO:FILE.gguf"]),
        (("models",), ["diptych models pull smollm2-135m"]),
        (
            ("settings", "--help"),
            ["diptych settings gateway", "DIPTYCH_GATEWAY__MAX_IN_FLIGHT=512"],
        ),
        (("doctor", "--help"), ["Exit code 1 if something is missing"]),
        (("doctor", "engine", "--help"), ["diptych doctor engine tensorrt_llm", "--url"]),
    ],
)
def test_help_teaches_by_example(
    arguments: tuple[str, ...], teaches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(*arguments) == 0
    text = capsys.readouterr().out
    for example in teaches:
        assert example in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--port", "0"), "expected a port from 1 to 65535, got '0'"),
        (("up", "--port", "http"), "expected a port from 1 to 65535, got 'http'"),
        (("up", "--decode", "0"), "expected 1 or more, got '0'"),
        (("up", "--prefill", "-1"), "expected 0 or more, got '-1'"),
        (("scale", "nats", "2"), "invalid choice: 'nats'"),
        (("scale", "decode", "many"), "expected 0 or more, got 'many'"),
        (("fly",), "invalid choice: 'fly'"),
    ],
)
def test_a_wrong_argument_is_told(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(*arguments) == 2
    assert says in capsys.readouterr().err


def test_help_needs_no_extra() -> None:
    script = "import sys; import diptych_cli.commands; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"nats", "structlog", "opentelemetry", "rich", "numpy", "uvloop"}


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_nats(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "nats":
            raise ModuleNotFoundError("No module named 'nats'", name="nats")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_nats)
    monkeypatch.delitem(sys.modules, "diptych_cli.readiness", raising=False)
    with pytest.raises(CliError) as caught:
        need("diptych_cli.readiness")
    assert str(caught.value) == "nats is not installed; try: pip install 'diptych[embedded]'"


def test_a_port_in_use_is_one_clear_line_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert ask("up", "--port", str(port), "--dir", str(tmp_path / "store")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"diptych: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert f"make up PORT={port + 1}" in line
    assert not (tmp_path / "store").exists()


def test_a_free_port_is_fine() -> None:
    port = free_port()
    up.require_free("127.0.0.1", port)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))  # looking took nothing
        assert other.getsockname()[1] == port


def test_a_held_port_is_the_gateways_and_nobody_elses() -> None:
    port = free_port()
    with up.held("127.0.0.1", port):
        with pytest.raises(CliError, match="Address already in use"):
            up.require_free("127.0.0.1", port)
        with socket.socket() as gateway:
            gateway.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            gateway.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            gateway.bind(("127.0.0.1", port))
            gateway.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=60):
                gateway.accept()[0].close()
    up.require_free("127.0.0.1", port)


@pytest.mark.parametrize(
    "command", [("top",), ("kv",), ("tap",), ("chat", "hi"), ("scale", "decode", "2")]
)
def test_without_a_stack_it_is_said_how_to_start_one(
    command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ask(*command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("diptych: no stack runs here; start one: diptych up")


def test_an_address_of_somebody_else_is_told() -> None:
    with pytest.raises(CliError, match=r"cannot listen on 192\.0\.2\.1:8080"):
        up.require_free("192.0.2.1", 8080)

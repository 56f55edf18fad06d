"""What cannot start says in one line what was expected and what was seen."""

import socket
from pathlib import Path

import pytest

from diptych_testkit.live_stack import MODEL, LiveStack, Process
from diptych_testkit.ports import free_port
from diptych_testkit.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.live


def refusal(process: Process, timeout_s: float = 240) -> str:
    """The one line a process that gave up left, besides its life-cycle lines."""
    assert process.popen.wait(timeout_s) != 0
    text = process.log.read_text()
    assert "Traceback" not in text, text
    complaints = [li for li in text.splitlines() if '"level":"error"' in li or li[:1] != "{"]
    assert len(complaints) == 1, text
    return complaints[0]


def test_a_missing_model_file(own_stack: LiveStack) -> None:
    line = refusal(own_stack.start("decode-worker", MODEL_PATH="/nowhere/model.gguf"))
    assert "/nowhere/model.gguf" in line


def test_no_model_at_all(own_stack: LiveStack) -> None:
    assert "MODEL_PATH" in refusal(own_stack.start("prefill-worker", MODEL_PATH="."))


def test_a_file_that_is_no_gguf(own_stack: LiveStack, tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"these are not weights" * 100)
    assert "GGUF" in refusal(own_stack.start("decode-worker", MODEL_PATH=str(path)))


def test_a_second_worker_with_another_base_model(own_stack: LiveStack, tmp_path: Path) -> None:
    first = own_stack.start("decode-worker")
    first.wait_ready()
    other = write_tiny_gguf(tmp_path / "other.gguf")
    line = refusal(own_stack.start("prefill-worker", MODEL_PATH=str(other), KV_TOKENS="2048"))
    assert MODEL in line
    assert first.incarnation in line
    assert "base" in line


def test_an_unknown_and_a_malformed_setting(own_stack: LiveStack) -> None:
    assert "KV_TOKNES" in refusal(own_stack.start("decode-worker", KV_TOKNES="1"))
    assert "KV_TOKENS" in refusal(own_stack.start("decode-worker", KV_TOKENS="many"))


def test_a_port_in_use(own_stack: LiveStack) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refusal(own_stack.start("gateway", PORT=port))


@pytest.mark.parametrize("service", ["gateway", "scheduler", "power-governor", "decode-worker"])
def test_nats_that_cannot_be_reached(service: str, tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    environment = {"DIPTYCH_ALL__NATS_URL": url, "DIPTYCH_ALL__BUS_WAIT_S": "1"}
    process = Process(service, tmp_path, environment)
    assert url in refusal(process)

"""`aiperf` loads a stack and leaves a fifth of its requests in the middle: nothing stays held.

    make nightly        # installs it (1.2 GB) beside the other clients

A tool of NVIDIA's with figures of its own; here it is a crowd somebody else wrote.
"""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from diptych_engine.sim_card import sim_card
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

VENV = "DIPTYCH_AIPERF_VENV"
REQUESTS = 60
SETTLED_S = 60.0
HELD = (
    "diptych_gateway_open_streams",
    "diptych_scheduler_owned_requests",
    "diptych_kv_transfer_slots_used",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `sim` engine's tokenizer, laid out as Hugging Face does."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(sim_card(model=MODEL).tokenizer_json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_a_fifth_of_the_requests_is_cancelled(
    sim: LiveStack, tokenizer: Path, tmp_path: Path, endpoint: str
) -> None:
    venv = os.environ.get(VENV)
    assert venv, f"run `make nightly`, which sets {VENV}"
    done = subprocess.run(
        [
            f"{venv}/bin/aiperf",
            "profile",
            *("--model", MODEL, "--url", f"http://127.0.0.1:{sim.port}"),
            *("--endpoint-type", endpoint, "--streaming", "--tokenizer", str(tokenizer)),
            *("--request-count", str(REQUESTS), "--concurrency", "8", "--random-seed", "3"),
            *("--synthetic-input-tokens-mean", "200", "--output-tokens-mean", "400"),
            *("--extra-inputs", "ignore_eos:true"),
            *("--request-cancellation-rate", "20", "--request-cancellation-delay", "0.05"),
            *("--output-artifact-dir", str(tmp_path / "out"), "--ui", "none"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    told: dict[str, Any] = json.loads(report.read_text())
    left = {error["error_details"]["code"]: error["count"] for error in told["error_summary"]}
    assert set(left) == {499}, left
    assert left[499] > REQUESTS / 10
    assert told["request_count"]["avg"] + left[499] == REQUESTS
    give_up_s = time.monotonic() + SETTLED_S
    while held := _held(sim):
        assert time.monotonic() < give_up_s, held
        time.sleep(0.1)


def _held(stack: LiveStack) -> list[str]:
    lines = [
        f"{process.service}: {line}"
        for process in stack.processes
        for line in process.page("/metrics").decode().splitlines()
        if line.startswith(HELD)
    ]
    assert len(lines) >= len(HELD)
    return [line for line in lines if float(line.rsplit(" ", 1)[1])]

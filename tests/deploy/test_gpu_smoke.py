"""The smoke test for GPUs, on the fake of TensorRT-LLM: what it says if all is well, and if not.

Both sides run on threads here, since fakes hand KV over within one process; on a GPU each has a
process of its own.
"""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych_contracts.fleet import Role
from diptych_engine.sim_card import CHAT_TEMPLATE, sim_card
from diptych_testkit import fake_tensorrt_llm as fake
from diptych_testkit.request_engines import trtllm

pytestmark = pytest.mark.deploy
TOP = Path(__file__).parents[2]
FOLDER = TOP / "infra/gpu-smoke"
PROMPTS = [list(range(1, 30)), list(range(5, 105))]


@pytest.fixture(scope="module")
def smoke() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("smoke")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("smoke", "pairs", "sides"):
            sys.modules.pop(name, None)


@contextmanager
def fleet(smoke: Any, *faults: fake.Faults) -> Iterator[tuple[Any, fake.World]]:
    """Both sides on the fake, each on a thread, started."""
    world, lines, threads = fake.World(), [], []
    for role, fault in zip((Role.PREFILL, Role.DECODE), faults, strict=True):
        engine = trtllm(fake.at("1.2.1", world=world, faults=fault).importer, role)
        ours, theirs = multiprocessing.Pipe()
        settings = smoke.sides.SideSettings(role, Path("toy"), "", {})
        args = (theirs, settings, lambda _, engine=engine: engine)
        threads.append(threading.Thread(target=smoke.sides.serve, args=args))
        threads[-1].start()
        lines.append(ours)
    pair = smoke.Pair(*map(smoke.Side, lines))
    try:
        yield pair, world
    finally:
        for side in (pair.prefill, pair.decode):
            side.stop()
        for thread in threads:
            thread.join(60)
        for line in lines:
            line.close()


def started(pair: Any) -> list[str]:
    return [line for side in (pair.prefill, pair.decode) for line in side.ready(60.0)]


def test_everything_passes_where_the_engine_does_as_it_says(smoke: Any) -> None:
    report = smoke.Report()
    with fleet(smoke, fake.Faults(step_s=0.001), fake.Faults(step_s=0.001)) as (pair, world):
        assert "version 1.2.1" in started(pair)
        assert pair.decode.engine == "tensorrt_llm-1.2.1"
        smoke.examine(pair, PROMPTS, report, time.monotonic() + 300)
    assert report.passed, report.text()
    assert [name for _, name, _ in report.checks] == [
        "greedy answers are those of one engine",
        "KV events",
        "abort",
        "hand-offs at once",
        "timings",
    ]
    assert world.misuse == []
    assert world.leaks == []
    assert "PASSED" in report.text()


def test_a_transfer_that_fails_is_said(smoke: Any) -> None:
    report = smoke.Report()
    with fleet(smoke, fake.Faults(), fake.Faults(transfer_fails=True)) as (pair, _):
        started(pair)
        assert not report.check("equality", lambda: smoke.equality(pair, PROMPTS))
    assert not report.passed
    assert "FAILED  equality: pair-" in report.text()


def test_no_kv_events_is_said(smoke: Any) -> None:
    report = smoke.Report()
    with fleet(smoke, fake.Faults(), fake.Faults()) as (pair, _):
        started(pair)
        assert not report.check("events", lambda: smoke.events(pair, 0.2))
    assert "prefill 0, decode 0" in report.text()


def test_an_engine_that_does_not_start_is_said(smoke: Any) -> None:
    refuses = fake.Faults(refuses_to_start="no GPU")
    with fleet(smoke, fake.Faults(), refuses) as (pair, _):
        pair.prefill.ready(60.0)
        with pytest.raises(smoke.Failed, match="no GPU"):
            pair.decode.ready(60.0)


def test_the_command_says_what_is_missing_here(tmp_path: Path) -> None:
    """In real processes, as on a GPU."""
    card = sim_card(model="m")
    config = {"max_position_embeddings": 2048, "vocab_size": 320, "eos_token_id": 2}
    names = {"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "tokenizer.json").write_text(card.tokenizer_json)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(FOLDER / "run"), "--model", str(tmp_path)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED  both engines start: TensorRT-LLM cannot be imported" in done.stdout
    assert "prefill on GPU 0, decode on GPU 1" in done.stdout

"""`make chaos` in small: a few faults of a fixed plan, on the simulated engine."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(1000)]

RUN = (sys.executable, "-m", "diptych_testkit.chaos", "--engine", "sim", "--any-pace")


def test_a_short_run_keeps_every_promise_and_leaves_nothing_behind(tmp_path: Path) -> None:
    plan = ("--streams", "24", "--seed", "1", "--minutes", "0.5", "--faults", "4")
    done = subprocess.run(
        [*RUN, *plan, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1: 4 faults" in done.stdout
    assert "0 lost, 0 repeated, 0 reordered, 0 changed" in done.stdout
    give_up_s = time.monotonic() + 60
    while (left := left_over(tmp_path)) and time.monotonic() < give_up_s:
        time.sleep(0.2)
    assert left == []


def left_over(folder: Path) -> list[str]:
    """Processes that still write their log into `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path.startswith(str(folder)) for file in process.open_files()):
                found.append(process.name())
    return found

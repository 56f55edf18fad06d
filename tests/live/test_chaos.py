"""`make chaos` in small: a few faults of a fixed plan, on the simulated engine."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(1000)]

RUN = (sys.executable, "-m", "diptych_testkit.chaos", "--engine", "sim", "--streams", "24")


def test_a_short_run_keeps_every_promise_and_leaves_nothing_behind(tmp_path: Path) -> None:
    plan = ("--seed", "1", "--minutes", "0.5", "--faults", "4")
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
    assert left_over(tmp_path) == []


def left_over(folder: Path) -> list[str]:
    """Processes that still write their log into `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path.startswith(str(folder)) for file in process.open_files()):
                found.append(process.name())
    return found

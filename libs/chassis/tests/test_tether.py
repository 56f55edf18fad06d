import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diptych_chassis import tether

PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "diptych_chassis.tether", str(os.getpid()), "--", "sleep", "60"]
child = subprocess.Popen(command)
print(child.pid, flush=True)
time.sleep(60)
"""


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or before it is read
        return False
    return state != "Z"


def wait_until(is_so: object, within_s: float = 60) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_the_child_dies_with_a_parent_that_was_killed_outright() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_until(lambda: command_of(child) == "sleep 60")
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not running(child))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_parent_that_is_gone_already_is_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diptych_chassis.tether", "1", "--", "echo", "ran"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_command_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diptych_chassis.tether", str(os.getpid()), "--", "no-such-thing"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 127
    assert done.stderr.decode() == "cannot run no-such-thing: No such file or directory\n"


@pytest.mark.parametrize("arguments", [[], ["1"], ["1", "--"], ["x", "--", "echo"], ["1", "echo"]])
def test_a_wrong_call_says_how(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tether.main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_what_the_shell_made_us_ignore_is_heard_again() -> None:
    ask = "import signal; print(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"
    tied = f'"{sys.executable}" -m diptych_chassis.tether $$ -- "{sys.executable}" -c "{ask}"'
    script = f"trap '' INT; {tied}; true"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"

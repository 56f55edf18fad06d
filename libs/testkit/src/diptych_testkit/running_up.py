"""`diptych up` and the other commands, as a user runs them."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from diptych_testkit.live_stack import PATIENT
from diptych_testkit.ports import free_port

READY_S = 300.0
ENDED_S = 150.0
"""Who does not end by himself is killed after 75 s."""
COMMAND = (sys.executable, "-m", "diptych_cli")


class Up:
    """A running `diptych up` and what it printed, with the deadlines `PATIENT`.

    Args:
        folder: Where it keeps what it remembers.
        arguments: Of `up`, beside its port.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        told = {
            f"DIPTYCH_{service.upper()}__{name}": value
            for service, settings in PATIENT.items()
            for name, value in settings.items()
        }
        self._environment = {**os.environ, **told, "XDG_STATE_HOME": str(folder)}
        self.process = subprocess.Popen(
            [*COMMAND, "up", "--port", str(self.port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def base_url(self) -> str:
        """What an OpenAI client is given."""
        return f"http://127.0.0.1:{self.port}/v1"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, text: str, within_s: float = READY_S) -> str:
        """Wait for a line with `text` in it."""
        deadline_s = time.monotonic() + within_s
        while (
            line := self._queue.get(timeout=max(0.1, deadline_s - time.monotonic()))
        ) is not None:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} did not appear in:\n" + "\n".join(self.lines))

    def end(self, number: signal.Signals) -> int:
        """Send it a signal and wait; gives the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until it has ended; gives the exit code."""
        code = self.process.wait(ENDED_S)
        self._reader.join(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        while (line := self._queue.get_nowait()) is not None:
            self.lines.append(line)
        return code

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Another command that finds this stack."""
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=self._environment,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0, timeout_s: float = 240.0) -> tuple[str, str]:
        """Another command, to its end; gives what it wrote to both outputs."""
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == code, f"{arguments} gave {process.returncode}: {out}{err}"
        return out, err

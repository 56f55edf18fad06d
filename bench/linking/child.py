"""The other process of a link bench: lines in, one number out for each."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Child:
    """What was started, once it has said its first line (`told`)."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.told = json.loads(process.stdout.readline())

    def ask(self, what: str) -> float:
        """Its answer to `what`."""
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def child(script: str, asked: dict) -> Iterator[Child]:
    """`script` run with `--reader` and what it is `asked`, until the end of the block."""
    command = [sys.executable, script, "--reader", json.dumps(asked)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.stdin.close()

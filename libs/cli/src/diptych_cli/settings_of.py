"""`diptych settings`: each service tells of its own."""

import subprocess
import sys
from collections.abc import Sequence

from diptych_cli import stack
from diptych_cli.failing import CliError


def show(services: Sequence[str]) -> int:
    """Print every setting of `services`; gives the exit code.

    Raises:
        CliError: one of them is not installed here.
    """
    for number, service in enumerate(services):
        command = (sys.executable, "-m", stack.package(service), "--help")
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        if told.returncode:
            last = told.stderr.strip().rpartition("\n")[2]
            raise CliError(f"the {service} cannot be asked: {last}")
        print("\n" * bool(number) + told.stdout, end="")
    return 0

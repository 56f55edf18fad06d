"""Fuzz every parser, each in a process of its own: `make fuzz SECONDS=600 SEED=`."""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil

from diptych_testkit.fuzzing.cases import Fault, check_case
from diptych_testkit.fuzzing.parsers import PARSERS
from diptych_testkit.fuzzing.running import run_for

_STUCK_CPU_S, _STUCK_S = 20.0, 600.0
"""Of the processor, or of the clock, in one case: what is stuck outside of Python hears no signal,
and what gets no processor is not stuck."""
_POLL_S = 0.2


def main() -> int:
    """The exit code: 1 after any fault."""
    asked = _arguments()
    if asked.case is not None:
        check_case(PARSERS[asked.parser[0]], asked.seed, asked.case)
        print(f"{asked.parser[0]}: case {asked.case} of seed {asked.seed} is fine")
        return 0
    if asked.mark is not None:
        return _alone(asked.parser[0], asked.seed, asked.seconds, asked.mark)
    names = asked.parser or list(PARSERS)
    print(f"{len(names)} parsers, {asked.seconds:g} s each, seed {asked.seed}", flush=True)
    failed = [_watched(name, asked.seed, asked.seconds) for name in names]
    return 1 if any(failed) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m diptych_testkit.fuzzing")
    parser.add_argument("--parser", action="append", choices=list(PARSERS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each parser")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--case", type=int, help="that one again, here")
    parser.add_argument("--mark", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if (asked.case is not None or asked.mark is not None) and len(asked.parser or ()) != 1:
        parser.error("expected one --parser with --case")
    return asked


def _alone(name: str, seed: int, seconds: float, mark: Path) -> int:
    """One parser, here; the file `mark` holds the number of the case in work."""
    fd = os.open(mark, os.O_WRONLY)
    try:
        course = run_for(PARSERS[name], seed, seconds, at_case=partial(_note, fd))
    except Fault as fault:
        print(fault, flush=True)
        return 1
    print(f"{name}: {course}", flush=True)
    return 0


def _note(fd: int, number: int) -> None:
    os.pwrite(fd, number.to_bytes(8, "little"), 0)


def _watched(name: str, seed: int, seconds: float) -> bool:
    """Whether it failed: by a fault, by its death, or stuck in one case."""
    with tempfile.NamedTemporaryFile() as mark:
        command = (sys.executable, "-m", "diptych_testkit.fuzzing", "--parser", name)
        process = subprocess.Popen(
            (*command, "--seed", str(seed), "--seconds", str(seconds), "--mark", mark.name)
        )
        try:
            how = _end_of(process, Path(mark.name))
        finally:
            process.kill()
            process.wait()
        if how:
            number = int.from_bytes(Path(mark.name).read_bytes(), "little")
            again = f"make fuzz PARSER={name} SEED={seed} CASE={number}"
            print(f"{name}: {how} in case {number}\n  again: {again}", flush=True)
        return process.returncode != 0


def _end_of(process: "subprocess.Popen[bytes]", mark: Path) -> str:
    """How it ended, if it could not say so itself."""
    last, since_s, since_cpu_s = b"", time.monotonic(), 0.0
    while process.poll() is None:
        time.sleep(_POLL_S)
        cpu_s = _cpu_s(process.pid)
        if (now := mark.read_bytes()) != last:
            last, since_s, since_cpu_s = now, time.monotonic(), cpu_s
        elif cpu_s - since_cpu_s > _STUCK_CPU_S or time.monotonic() - since_s > _STUCK_S:
            return f"stuck for {time.monotonic() - since_s:.0f} s"
    code = process.returncode
    return f"died of {signal.Signals(-code).name}" if code < 0 else ""


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())

"""Cases of one parser, one after another, and what they cost."""

import gc
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diptych_testkit.fuzzing.cases import Fault, Parser, check_case

MAX_GROWTH_BYTES = 64 * 1024 * 1024
"""Of what is held, over thousands of cases."""
_WARM_UP = 0.25
"""Of all cases: caches fill, buffers grow."""


@dataclass(frozen=True, slots=True)
class Course:
    """What a run came to."""

    cases: int
    cpu_s: float
    grown_bytes: int
    """Held at the end, beyond what was held after the first quarter."""

    def __str__(self) -> str:
        rate = self.cases / self.cpu_s if self.cpu_s else 0.0
        grown = self.grown_bytes / 1e6
        return f"{self.cases} cases, {rate:.0f} per second of CPU, {grown:+.1f} MB"


def run_cases(parser: Parser, seed: int, cases: int) -> Course:
    """So many cases from the first. Raises `Fault`."""
    began_s = time.process_time()
    held = 0
    for number in range(cases):
        if number == int(cases * _WARM_UP):
            held = held_bytes()
        check_case(parser, seed, number)
    return _over(parser, seed, cases, began_s, held)


def run_for(parser: Parser, seed: int, seconds: float, *, at_case: Callable[[int], None]) -> Course:
    """Cases from the first until the time is over. Raises `Fault`."""
    began_s, cpu_s, number, held = time.monotonic(), time.process_time(), 0, 0
    while (spent_s := time.monotonic() - began_s) < seconds:
        if not held and spent_s > seconds * _WARM_UP:
            held = held_bytes()
        at_case(number)
        check_case(parser, seed, number)
        number += 1
    return _over(parser, seed, number, cpu_s, held)


def _over(parser: Parser, seed: int, cases: int, began_s: float, held: int) -> Course:
    grown = held_bytes() - held if held else 0
    if grown > MAX_GROWTH_BYTES:
        text = f"{parser.name}: {cases} cases of seed {seed} left {grown / 1e6:.0f} MB behind"
        raise Fault(text)
    return Course(cases, time.process_time() - began_s, grown)


def held_bytes() -> int:
    """The memory this process holds."""
    gc.collect()
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return pages * os.sysconf("SC_PAGE_SIZE")

"""What every case must keep to: an error of our tree or an answer, in bounded time and memory."""

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

from diptych_contracts.errors import DiptychError

MAX_CASE_BYTES = 96 * 1024 * 1024
"""By which one case may raise the most memory this process ever held."""
MAX_TOLD_CHARS = 4000
"""Longest error: one that repeats its input would carry four megabytes back."""
_KIB = 1 if sys.platform == "darwin" else 1024
_SHOWN = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """One way into Diptych."""

    name: str
    make: Callable[[Random], Any]
    """A case."""
    read: Callable[[Any], None]
    """What is fuzzed; what it gives is its own to check, by assertions."""
    told: tuple[type[BaseException], ...] = (DiptychError,)
    """How it may say that a case is wrong."""
    cases: int
    """How many take about a second."""
    cpu_s: float = 2.0
    """Most a case may take; the worst that is known takes a fifth."""


class Fault(AssertionError):
    """A case that did what none may."""


class _Hung(BaseException):
    """Not to be caught by what is fuzzed."""


def check_case(parser: Parser, seed: int, number: int) -> None:
    """Run one case.

    Raises:
        Fault: says what happened, and how to make it happen again.
    """
    case = parser.make(Random(f"{seed}/{parser.name}/{number}"))
    before = most_bytes_held()
    try:
        with _cpu_limit(parser.cpu_s):
            parser.read(case)
    except parser.told as err:
        why = _untold(err)
    except (KeyboardInterrupt, SystemExit):
        raise
    except _Hung as err:
        raise _fault(parser, seed, number, case, f"took {parser.cpu_s} s of CPU") from err
    except BaseException as err:  # a panic of Rust code is no Exception
        why = f"raised {type(err).__name__}: {str(err)[:_SHOWN]}"
        raise _fault(parser, seed, number, case, why) from err
    else:
        why = ""
    grown = most_bytes_held() - before
    if not why and grown > MAX_CASE_BYTES:
        why = f"took {grown / 1e6:.0f} MB"
    if why:
        raise _fault(parser, seed, number, case, why)


def _untold(err: BaseException) -> str:
    """What is wrong with how an error puts it."""
    if not str(err).strip():
        return f"raised a {type(err).__name__} that says nothing"
    if len(str(err)) > MAX_TOLD_CHARS:
        return f"raised a {type(err).__name__} of {len(str(err))} characters"
    return ""


def _fault(parser: Parser, seed: int, number: int, case: Any, why: str) -> Fault:
    again = f"make fuzz PARSER={parser.name} SEED={seed} CASE={number}"
    return Fault(f"{parser.name}: case {number} {why}\n  again: {again}\n  case: {shown(case)}")


def shown(case: Any) -> str:
    """The beginning of a case."""
    return repr(case)[:_SHOWN]


def most_bytes_held() -> int:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


@contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    def hung(_number: int, _frame: Any) -> None:
        raise _Hung

    before = signal.signal(signal.SIGPROF, hung)
    # Again and again: what catches everything once hangs on.
    signal.setitimer(signal.ITIMER_PROF, cpu_s, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _cpu_limit(cpu_s: float) -> Any:
    return _limited(cpu_s) if cpu_s else nullcontext()

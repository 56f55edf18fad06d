"""What a run may be told: `python -m diptych_testkit.chaos --help`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from diptych_testkit.chaos.undisturbed import EngineName


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run."""

    seed: int
    minutes: float
    faults: int | None
    streams: int
    engine: EngineName
    folder: Path | None
    """Where stores and logs go, to be kept; None: a temporary one."""
    any_pace: bool = False
    """Show figures of time and do not judge them: on a machine that others share, any process may
    stand still for seconds."""


def parse(arguments: Sequence[str]) -> Options:
    """The options in `arguments`; ends the process if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m diptych_testkit.chaos",
        description="The real stack under faults at random moments; fails if a promise is broken.",
    )
    parser.add_argument("--seed", type=int, default=None, help="replays a plan; default: random")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load; default 10")
    parser.add_argument("--faults", type=int, default=None, help="default: six per minute")
    parser.add_argument("--streams", type=int, default=20, help="at all times; default 20")
    parser.add_argument("--engine", choices=("llamacpp", "sim"), default="llamacpp")
    parser.add_argument("--folder", type=Path, default=None, help="keep stores and logs here")
    parser.add_argument("--any-pace", action="store_true", help="do not judge figures of time")
    given = parser.parse_args(arguments)
    seed = SystemRandom().randrange(10**6) if given.seed is None else given.seed
    return Options(
        seed=seed,
        minutes=given.minutes,
        faults=given.faults,
        streams=given.streams,
        engine=given.engine,
        folder=given.folder,
        any_pace=given.any_pace,
    )

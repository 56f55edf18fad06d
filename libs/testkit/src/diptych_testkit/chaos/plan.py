"""Which faults strike, and when: a pure function of a seed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random

FAULTS_PER_MINUTE = 6


class Target(StrEnum):
    """What is struck. The order is that of the table."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    PREFILL = "prefill-worker"
    DECODE = "decode-worker"
    GOVERNOR = "power-governor"
    NATS = "nats"
    MACHINE = "machine"


class Kind(StrEnum):
    """How."""

    KILL = "kill"
    """SIGKILL, and a new process a while later."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT a while later."""
    BURN = "burn"
    """Every core is kept busy by strangers."""


SERVICES = (Target.GATEWAY, Target.SCHEDULER, Target.PREFILL, Target.DECODE, Target.GOVERNOR)

_FREEZES_S = (0.4, 2.0, 4.0, 8.0)
"""The first is too short for anybody to be declared dead."""
_NATS_FREEZES_S = (1.0, 2.0, 3.0, 5.0)
_PAUSES_S = (0.0, 0.5, 2.0)
"""How long a killed service stays away, its own start not counted."""
_NATS_PAUSES_S = (0.0, 1.0, 3.0, 10.0)
_BURNS_S = (3.0, 6.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    number: int
    at_s: float
    """Since the load began; later if the one before is not over yet."""
    kind: Kind
    target: Target
    replica: int
    """Which of its replicas: the remainder counts."""
    for_s: float
    """How long it is frozen, away or busy."""

    @property
    def name(self) -> str:
        """What the table calls its like."""
        return f"{self.kind} {self.target}"


def names() -> list[str]:
    """Every name a fault can have, as the table lists them."""
    return [f"{kind} {target}" for kind, target in _deck()]


def make_plan(seed: int, *, minutes: float, faults: int | None = None) -> tuple[Fault, ...]:
    """The faults of a run, in order: each kind as often as the others, give or take one.

    Args:
        seed: The same one gives the same plan.
        minutes: How long the load lasts.
        faults: How many; by default six per minute.
    """
    rng = Random(seed)
    count = faults if faults is not None else max(1, math.ceil(FAULTS_PER_MINUTE * minutes))
    spacing_s = 60 * minutes / max(1, count)
    strikes = _strikes(rng)
    return tuple(
        _fault(number, (number + rng.random()) * spacing_s, next(strikes), rng)
        for number in range(count)
    )


def _deck() -> list[tuple[Kind, Target]]:
    pairs = [
        (kind, target) for target in (*SERVICES, Target.NATS) for kind in (Kind.KILL, Kind.FREEZE)
    ]
    return [*pairs, (Kind.BURN, Target.MACHINE)]


def _strikes(rng: Random) -> Iterator[tuple[Kind, Target]]:
    while True:
        deck = _deck()
        rng.shuffle(deck)
        yield from deck


def _fault(number: int, at_s: float, strike: tuple[Kind, Target], rng: Random) -> Fault:
    kind, target = strike
    choices: tuple[float, ...]
    match strike:
        case Kind.KILL, Target.NATS:
            choices = _NATS_PAUSES_S
        case Kind.FREEZE, Target.NATS:
            choices = _NATS_FREEZES_S
        case Kind.KILL, _:
            choices = _PAUSES_S
        case Kind.FREEZE, _:
            choices = _FREEZES_S
        case _:
            choices = _BURNS_S
    return Fault(number, at_s, kind, target, rng.randrange(16), rng.choice(choices))

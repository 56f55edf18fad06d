"""How long streams paused around a fault: the longest gap between two pieces of text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from diptych_testkit.chaos.checking import Outcome, Told
from diptych_testkit.chaos.plan import Fault, Kind, Target

REACH_S = 2.0
"""A pause belongs to a fault if it overlaps the fault, or the two seconds after its beginning."""
DEATH_S = 2.0
"""Longest pause after a decode worker's death, its re-prefill apart."""
FREEZE_S = 6.0
BACK_S = 3.0
"""After the way itself (gateway, bus, machine) is back."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault as it happened."""

    fault: Fault
    member: str
    """Incarnation of the victim; empty for NATS and the machine."""
    began_s: float
    ended_s: float
    """When it was over: thawed, or its successor ready."""
    hit: frozenset[str] = frozenset()
    """Requests that depended on the victim when it was struck."""


@dataclass(frozen=True, slots=True)
class Pause:
    """One stream's pause around one fault."""

    took_s: float
    again_s: float = 0.0
    """How much of it was spent on prefilling again: from the fence to the next token."""

    @property
    def noticing_s(self) -> float:
        """The rest: until the death was noticed and the next attempt announced."""
        return max(0.0, self.took_s - self.again_s)


@dataclass(frozen=True, slots=True)
class Again:
    """A new attempt, as the journal showed it."""

    fenced_s: float
    token_s: float
    """When its first token came."""


def pause(told: Told, struck: Struck, again: Sequence[Again] = ()) -> Pause | None:
    """The stream's longest pause around `struck`; None if it did not stream then."""
    until_s = max(struck.began_s + REACH_S, _lasts_until_s(struck))
    times = list(told.times_s)
    if told.outcome in (Outcome.FINISHED, Outcome.FAILED):
        times.append(told.ended_s)
    gaps = [
        (end_s - start_s, start_s, end_s)
        for start_s, end_s in pairwise(times)
        if end_s > struck.began_s and start_s < until_s
    ]
    if not gaps:
        return None
    took_s, start_s, end_s = max(gaps)
    spent_s = sum(
        min(a.token_s, end_s) - a.fenced_s for a in again if start_s <= a.fenced_s < end_s
    )
    return Pause(took_s, spent_s)


def _lasts_until_s(struck: Struck) -> float:
    """How long a stream may be touched by the fault itself, its victim's restart apart."""
    return struck.began_s + struck.fault.for_s


def allowed_s(fault: Fault) -> float | None:
    """The longest pause that is promised; None where a pause is the client's own doing."""
    match fault.kind, fault.target:
        case Kind.KILL, Target.DECODE:
            return DEATH_S
        case Kind.KILL, Target.NATS:
            return fault.for_s + BACK_S
        case Kind.FREEZE, (Target.NATS | Target.GATEWAY):
            return max(FREEZE_S, fault.for_s + BACK_S)
        case Kind.BURN, _:
            return None
        case _:
            return FREEZE_S


def judged_s(fault: Fault, seen: Pause) -> float:
    """The part of a pause that `allowed_s` speaks of."""
    death = fault.kind is Kind.KILL and fault.target is Target.DECODE
    return seen.noticing_s if death else seen.took_s


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of them do not exceed; 0 without any."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

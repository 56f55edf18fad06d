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
FREEZE_S = 6.0
"""Longest pauses after a worker's death and freeze, the re-prefill apart: that takes as long as the
machine takes for it."""
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
    """A gap between two pieces of one stream."""

    start_s: float
    end_s: float
    fenced_s: float | None = None
    """When the journal showed the first new attempt within it."""

    @property
    def took_s(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s

    @property
    def noticing_s(self) -> float:
        """Until the next attempt was announced; what follows is prefilled again."""
        return self.took_s if self.fenced_s is None else self.fenced_s - self.start_s


def pauses(told: Told, struck: Sequence[Struck], fences_s: Sequence[float]) -> dict[int, Pause]:
    """The stream's longest pause for each fault that hit it, by the fault's number.

    A gap belongs to the first fault it overlaps: one that follows did not begin it.

    Args:
        told: The stream.
        struck: All faults, in order.
        fences_s: When the journal showed new attempts of its request.
    """
    times = list(told.times_s)
    if told.outcome in (Outcome.FINISHED, Outcome.FAILED):
        times.append(told.ended_s)
    longest: dict[int, Pause] = {}
    for start_s, end_s in pairwise(times):
        cause = next((s for s in struck if _overlaps(s, start_s, end_s)), None)
        if cause is None or told.request_id not in cause.hit:
            continue
        fenced_s = next((f for f in fences_s if start_s <= f < end_s), None)
        found = Pause(start_s, end_s, fenced_s)
        known = longest.get(cause.fault.number)
        if known is None or found.took_s > known.took_s:
            longest[cause.fault.number] = found
    return longest


def _overlaps(struck: Struck, start_s: float, end_s: float) -> bool:
    until_s = struck.began_s + max(REACH_S, struck.fault.for_s)
    return end_s > struck.began_s and start_s < until_s


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


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of them do not exceed; 0 without any."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

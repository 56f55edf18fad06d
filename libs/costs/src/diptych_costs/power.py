"""How much power a GPU draws, and what a cap does to it. Pure formulas.

    P(f) = P_idle + (P_full - P_idle) * f * V(f)^2          f, V as fractions of their maximum

Dynamic power of CMOS: proportional to clock and to voltage squared; the voltage falls with the
clock down to a knee and is flat below. `P_full` is what a kind of work draws at full clock. A cap
lowers the clock until P(f) fits. Time follows the clock: prefill, compute-bound, as 1/f; decode,
bound by memory, not at all above a knee and as 1/f below it.

The shape is simple on purpose: knees must be fitted per GPU and model, and no public table has
them. So whatever uses these formulas is a simulation and says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import log2


class Work(StrEnum):
    """What a device computes in a step."""

    PREFILL = "prefill"
    """Also a step that mixes both: the prompt's tokens dominate it."""
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """One kind of board. Powers in watts; clocks and voltages as fractions of their maximum."""

    name: str
    idle_w: float
    """With a context open, no work."""
    prefill_w: float
    """Large matrix products at full clock."""
    decode_w: Sequence[tuple[int, float]]
    """(sequences in the batch, watts at full clock), rising."""
    cap_min_w: float
    cap_max_w: float
    """Also the cap a board starts with."""
    clock_min_frac: float
    voltage_min_frac: float
    voltage_knee_frac: float
    """The clock below which the voltage falls no further."""
    decode_knee_frac: float
    """The clock below which decode slows down."""

    def scaled(self, cap_max_w: float) -> "PowerProfile":
        """The same board with all powers scaled so that its highest cap is `cap_max_w`.

        Raises:
            ValueError: if that is not positive.
        """
        if not cap_max_w > 0:
            raise ValueError(f"a board needs a positive power, got {cap_max_w} W")
        ratio = cap_max_w / self.cap_max_w
        return replace(
            self,
            idle_w=self.idle_w * ratio,
            prefill_w=self.prefill_w * ratio,
            decode_w=tuple((batch, watts * ratio) for batch, watts in self.decode_w),
            cap_min_w=self.cap_min_w * ratio,
            cap_max_w=cap_max_w,
        )


def full_clock_w(profile: PowerProfile, work: Work, *, batch: int = 1) -> float:
    """Power at full clock. Decode is interpolated over log2 of the batch, flat beyond the table."""
    if work is Work.PREFILL:
        return profile.prefill_w
    points = profile.decode_w
    if batch <= points[0][0]:
        return points[0][1]
    for (batch_a, watts_a), (batch_b, watts_b) in pairwise(points):
        if batch <= batch_b:
            way = log2(batch / batch_a) / log2(batch_b / batch_a)
            return watts_a + way * (watts_b - watts_a)
    return points[-1][1]


def voltage_frac(profile: PowerProfile, clock_frac: float) -> float:
    """Voltage at a clock: linear above the knee, flat below."""
    knee = profile.voltage_knee_frac
    way = max(0.0, clock_frac - knee) / (1 - knee)
    return profile.voltage_min_frac + way * (1 - profile.voltage_min_frac)


def power_at_clock_w(profile: PowerProfile, full_w: float, clock_frac: float) -> float:
    """Power of work that draws `full_w` at full clock."""
    dynamic_frac = clock_frac * voltage_frac(profile, clock_frac) ** 2
    return profile.idle_w + (full_w - profile.idle_w) * dynamic_frac


def clock_under_cap(profile: PowerProfile, full_w: float, cap_w: float) -> float:
    """The highest clock whose power fits under `cap_w`; the lowest clock if none does."""
    if full_w <= cap_w:
        return 1.0
    low, high = profile.clock_min_frac, 1.0
    if power_at_clock_w(profile, full_w, low) >= cap_w:
        return low
    for _ in range(40):  # 2^-40 of the range: exact for every purpose
        middle = (low + high) / 2
        if power_at_clock_w(profile, full_w, middle) <= cap_w:
            low = middle
        else:
            high = middle
    return low


def slowdown(profile: PowerProfile, work: Work, clock_frac: float) -> float:
    """How many times longer a step takes than at full clock; at least 1."""
    if work is Work.PREFILL:
        return 1 / clock_frac
    return max(1.0, profile.decode_knee_frac / clock_frac)

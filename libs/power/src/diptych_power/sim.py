"""A simulated device: what a GPU would draw for the steps a CPU engine really runs.

Powers come from `costs` (formulas with sources), durations from the engine, so joules are *not*
measured: everything says `sim`. A cap lowers the simulated power only. The CPU that does the work
is not slowed down; how much slower the simulated board would have been is told by `slowdown`.
"""

from diptych_contracts.power import PowerSetPoint
from diptych_costs.gpus import H100_SXM
from diptych_costs.power import (
    PowerProfile,
    Work,
    clock_under_cap,
    full_clock_w,
    power_at_clock_w,
    slowdown,
)
from diptych_power.lease import CapLease
from diptych_power.port import Reading
from diptych_power.window import PowerWindow


class SimulatedDevice:
    """A meter and a cap in one. All calls come from one thread.

    Args:
        tdp_w: Board power: default and highest cap; None is that of `profile`.
        profile: The board, scaled to `tdp_w`.
    """

    energy_source = "sim"

    def __init__(self, tdp_w: float | None = None, *, profile: PowerProfile = H100_SXM) -> None:
        self._profile = profile if tdp_w is None else profile.scaled(tdp_w)
        self._lease = CapLease(default_w=self._profile.cap_max_w, min_w=self._profile.cap_min_w)
        self._window = PowerWindow()
        self._cap_w = self._lease.default_w
        self._above_idle_j = 0.0
        self._idle_j = 0.0
        self._read_s: float | None = None

    @property
    def name(self) -> str:
        """The board it stands for."""
        return f"sim:{self._profile.name}"

    @property
    def cap_min_w(self) -> float:
        """The lowest cap."""
        return self._lease.min_w

    @property
    def cap_default_w(self) -> float:
        """The cap without a governor; also the highest."""
        return self._lease.default_w

    def apply(self, set_point: PowerSetPoint, now_s: float) -> bool:
        """Take a leased cap; False if it is stale or malformed."""
        taken = self._lease.offer(set_point, now_s)
        self._cap_w = self._lease.cap_w(now_s)
        return taken

    def busy(self, duration_s: float, work: Work, *, batch: int = 1) -> float:
        """Account for a step that has just ended; gives its energy in joules, idle share included.

        Args:
            duration_s: How long the engine computed.
            work: What it computed.
            batch: For decode: sequences in the step.
        """
        watts = self._power_w(work, batch)
        above_idle_w = watts - self._profile.idle_w
        self._above_idle_j += above_idle_w * duration_s
        self._window.add(duration_s, above_idle_w)
        return watts * duration_s

    def step_energy_j(self, duration_s: float, *, prefill_tokens: int, decode_tokens: int) -> float:
        """`busy` for a step known by its tokens: one that holds prompt tokens counts as prefill."""
        work = Work.PREFILL if prefill_tokens else Work.DECODE
        return self.busy(duration_s, work, batch=decode_tokens)

    def slowdown(self, work: Work, *, batch: int = 1) -> float:
        """How many times longer such a step would take on the board under the present cap."""
        full_w = full_clock_w(self._profile, work, batch=batch)
        return slowdown(self._profile, work, clock_under_cap(self._profile, full_w, self._cap_w))

    def read(self, now_s: float) -> Reading:
        """The device now. `now_s` is monotonic; the lease and idle energy follow it."""
        before_s = now_s if self._read_s is None else self._read_s
        self._read_s = max(before_s, now_s)
        self._idle_j += self._profile.idle_w * (self._read_s - before_s)
        self._cap_w = self._lease.cap_w(now_s)
        return Reading(
            power_w=self._profile.idle_w + self._window.mean_above_idle_w(now_s),
            energy_j=self._idle_j + self._above_idle_j,
            cap_w=self._cap_w,
        )

    def _power_w(self, work: Work, batch: int) -> float:
        full_w = full_clock_w(self._profile, work, batch=batch)
        clock = clock_under_cap(self._profile, full_w, self._cap_w)
        return power_at_clock_w(self._profile, full_w, clock)

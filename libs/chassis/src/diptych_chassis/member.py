"""What a service is given: who it is, its bus, and when to stop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from secrets import token_bytes

from diptych_bus.access import Access
from diptych_bus.port import Bus
from diptych_chassis.ending import Stopping
from diptych_chassis.vitals import Readiness, Vitals
from diptych_contracts.ids import Incarnation

_TOLD_BEATS = 2
"""When the second beat leaves, the first is on its way."""
_LOOKS = 50
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One life of one process, with everything a service needs from outside."""

    service: str
    incarnation: Incarnation
    bus: Bus
    rng: Random
    stopping: Stopping = field(default_factory=Stopping)
    """Set once: stop taking work, finish or hand back what is held, return."""
    clock: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns
    """Wall clocks differ between hosts, and are set: only for what others must understand."""
    secret_bytes: Callable[[int], bytes] = token_bytes
    """What nobody can guess. Of `rng` they can: it also draws what everybody sees."""
    access: Access | None = None
    """Its identity, to sign with, and what it believes of others; None on a memory bus."""
    vitals: Vitals = field(default_factory=lambda: Vitals(time.monotonic()))

    def ready(self, is_ready: bool, detail: str = "") -> None:
        """Tell supervisors and probes whether this process serves, and if not, why."""
        self.vitals.report(Readiness(ready=is_ready, detail=detail))

    @asynccontextmanager
    async def patience(self, longer_s: float) -> AsyncIterator[None]:
        """Do what lets no thread of this process run inside the `async with`.

        A library that holds Python's lock stops beats too, and after a second of silence the others
        take this process for dead. So they are told first that it may be silent for `longer_s`
        more. Who never beat need not say so, and with the bus away nobody is declared dead.
        """
        self.vitals.patience_s = longer_s
        try:
            told = self.vitals.last_beat + _TOLD_BEATS
            for _ in range(_LOOKS):
                if not self.vitals.last_beat or self.vitals.last_beat >= told:
                    break
                await asyncio.sleep(_LOOK_S)
            yield
        finally:
            self.vitals.patience_s = 0.0

    def now_s(self) -> float:
        """Monotonic time."""
        return self.clock()

    def unix_ms(self) -> int:
        """Wall time, as this host has it."""
        return self.wall_ns() // 1_000_000

    def beat_sent_s(self, count: int) -> float | None:
        """When this process's own beat `count` left; None if unknown.

        An observer that gets its own beat back asks this: the bus carries its word only while that
        is recent (`now_s() - beat_sent_s(count) < 0.3`).
        """
        return self.vitals.beat_sent_s(count)

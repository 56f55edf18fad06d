"""Ids of hand-offs: positive 63-bit numbers above 2^40, unique over all workers.

Below 2^40 the engine counts its own requests. Up to 1.3.0rc21 the vendor's layout is time (41
bits), machine (10), counter (12); then time (39), node (8), process (6), counter (10). The engine
reads none of the bits, but other senders in a fleet make ids in its layout: ours keep to it too.
"""

import os
import secrets
import time
from collections.abc import Callable

from diptych_contracts.errors import Permanent

MIN_ID = 1 << 40
MAX_ID = (1 << 63) - 1


def _time_ms() -> int:
    return time.time_ns() // 1_000_000


class RequestIds:
    """Makes ids.

    Args:
        process_ids: Whether the layout is the one with process ids.
        machine: Which sender this is: in [0, 1024), or in [0, 16384) with process ids. None draws
            one: of a hundred senders two then share it with a chance of 1 in 4, and they clash
            if both make the same count in the same millisecond.
        clock_ms: Milliseconds.

    Raises:
        Permanent: there is no such machine.
    """

    def __init__(
        self,
        *,
        process_ids: bool,
        machine: int | None = None,
        clock_ms: Callable[[], int] = _time_ms,
    ) -> None:
        self._machine_bits, self._count_bits = (14, 10) if process_ids else (10, 12)
        space = 1 << self._machine_bits
        if machine is not None and not 0 <= machine < space:
            raise Permanent(f"machine_id: expected 0 to {space - 1}, got {machine}")
        self._machine = secrets.randbelow(space) if machine is None else machine
        self._clock_ms = clock_ms
        # From a random count, so that two that drew the same machine do not count in step.
        self._count = int.from_bytes(os.urandom(2), "little")

    def next(self) -> int:
        """One more id."""
        self._count += 1
        bits = self._machine_bits + self._count_bits
        now_ms = self._clock_ms() % (1 << (63 - bits))
        count = self._count % (1 << self._count_bits)
        number = now_ms << bits | self._machine << self._count_bits | count
        return number % (MAX_ID - MIN_ID) + MIN_ID

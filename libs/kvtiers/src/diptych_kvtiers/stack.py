"""Tiers, asked in turn from the fastest to the slowest.

A caller sees hits and misses and never an exception: what a tier cannot do is a miss, counted, and
that tier is left alone for a while that grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych_kvtiers.port import Entry, Tier, TierKey, TierUsage


@dataclass(frozen=True, slots=True)
class Found:
    """How many leading blocks are there, and what reading them would take."""

    n_blocks: int = 0
    n_bytes: int = 0
    read_s: float = 0.0
    """Estimated by each tier's measured speed."""
    tiers: tuple[str, ...] = ()
    """Where each block is: the fastest tier's name."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What became of the order to forget a tenant."""

    entries: int = 0
    unreachable: tuple[str, ...] = ()
    """Tiers that could not be reached: they are tried again, and give nothing of it meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLimits:
    """Bounds of a stack."""

    waiting_bytes: int = 256 * 1024**2
    """In the line of writes of one tier; what does not fit is dropped."""
    find_s: float = 0.25
    """How long `find` waits for all tiers together."""
    at_once: int = 8
    """Blocks that are read at once."""


class TierStack:
    """Tiers as one store. Use from one event loop, between `start` and `close`."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        fleet_key: bytes | None = None,
        limits: StackLimits | None = None,
    ) -> None:
        """Tiers, fastest first; with a `fleet_key` (32 bytes) entries are sealed with AES-GCM."""
        raise NotImplementedError

    async def start(self) -> None:
        """Begin to open the tiers; does not wait for them."""
        raise NotImplementedError

    async def find(self, keys: Sequence[TierKey]) -> Found:
        """The longest run of leading `keys` of which each is in some tier, found in one go."""
        raise NotImplementedError

    async def read(self, keys: Sequence[TierKey], *, timeout_s: float) -> list[Entry]:
        """The verified blocks of leading `keys`, as `put` was given them.

        Fewer than asked for where one is missing, does not verify or is not there in `timeout_s`.
        """
        raise NotImplementedError

    def put(self, key: TierKey, data: Entry) -> bool:
        """Store a block in every tier, by and by. False: dropped, the lines of writes are full.

        Never waits. Nobody may change what is under `data` any more.
        """
        raise NotImplementedError

    async def forget(self, tenant_tag: str) -> Forgotten:
        """Remove everything of a tenant, also what waits to be written."""
        raise NotImplementedError

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is written or dropped; False if `timeout_s` ran out."""
        raise NotImplementedError

    def usage(self) -> tuple[TierUsage, ...]:
        """How each tier fares, fastest first."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop writing and let go of the tiers."""
        raise NotImplementedError

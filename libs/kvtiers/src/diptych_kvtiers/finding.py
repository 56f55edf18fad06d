"""The longest run of leading entries over several tiers (pure but for asking).

A tier says how many of the first keys it has, not which of the later ones: where its run ends it is
asked again from the place that the others have carried the run to.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from diptych_kvtiers.port import TierKey
from diptych_kvtiers.rung import Rung


@dataclass(frozen=True, slots=True)
class Found:
    """How many leading blocks are there, and what reading them would take."""

    n_blocks: int = 0
    n_bytes: int = 0
    """Of their entries."""
    read_s: float = 0.0
    """Estimated by each tier's measured speed."""
    tiers: tuple[str, ...] = ()
    """Where each block is: the fastest tier's name."""


@dataclass(slots=True)
class _Run:
    sizes: list[int]
    rungs: list[Rung]


async def longest_run(rungs: Sequence[Rung], keys: Sequence[TierKey], *, within_s: float) -> Found:
    """What is there of `keys` from the first on; a tier that does not say in time has nothing."""
    run = _Run([], [])
    end_s = asyncio.get_running_loop().time() + within_s
    asked = list(rungs)
    while asked and len(run.sizes) < len(keys):
        begin = len(run.sizes)
        left_s = end_s - asyncio.get_running_loop().time()
        told = await asyncio.gather(*(_told(rung, keys[begin:], left_s) for rung in asked))
        longest = max(len(sizes) for sizes in told)
        for at in range(longest):
            n = next(n for n, sizes in enumerate(told) if len(sizes) > at)
            run.sizes.append(told[n][at])
            run.rungs.append(asked[n])
        asked = [rung for rung in rungs if longest and not _has_ended(rung, asked, told, longest)]
    return _found(run)


def _has_ended(
    rung: Rung, asked: Sequence[Rung], told: Sequence[Sequence[int]], longest: int
) -> bool:
    """Whether it is known that `rung` lacks the key after the run."""
    return rung in asked and len(told[asked.index(rung)]) == longest


async def _told(rung: Rung, keys: Sequence[TierKey], within_s: float) -> Sequence[int]:
    try:
        async with asyncio.timeout(within_s):
            return await rung.sizes(keys)
    except TimeoutError:
        return ()


def _found(run: _Run) -> Found:
    return Found(
        n_blocks=len(run.sizes),
        n_bytes=sum(run.sizes),
        read_s=sum(
            n_bytes / rung.speed.bytes_per_s
            for n_bytes, rung in zip(run.sizes, run.rungs, strict=True)
        ),
        tiers=tuple(rung.name for rung in run.rungs),
    )

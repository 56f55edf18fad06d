"""Prompts too long for a message: packed, named by their request, stored before it.

What is stored for a request that then is not accepted is taken back, as far as the bus is there;
the schedulers' sweep finds the rest (`policy.orphans`).
"""

import asyncio
from array import array
from collections.abc import Sequence
from contextlib import suppress

from diptych_bus.port import Bus
from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import BusAway, Transient
from diptych_contracts.ids import RequestId
from diptych_contracts.prompts import MAX_KNOWN_BLOCKS, PromptRef, compact, digest_of, packed
from diptych_contracts.streams import PROMPTS
from diptych_policy.prefixes import block_hashes

BYTES_PER_S = 2 * 1024 * 1024
"""A prompt's own time to be stored is reckoned by this; a local server takes 50 times as much."""
_TAKE_BACK_S = 1.0


def named(
    ids: Sequence[int], request_id: RequestId, *, tenant: str, card: ModelCard
) -> tuple[PromptRef, bytes]:
    """The reference to a prompt, and the object that it names; 5 ms for a million tokens."""
    if not isinstance(ids, array):
        ids = compact(card.vocab_size, ids)
    width, data = packed(ids)
    base, block_tokens = card.fingerprint.base, card.block_tokens
    known = ids[: MAX_KNOWN_BLOCKS * block_tokens]
    ref = PromptRef(
        name=request_id,
        tokens=len(ids),
        width=width,
        digest=digest_of(data),
        model_base=base,
        block_tokens=block_tokens,
        block_hashes=block_hashes(tenant, base, known, block_tokens),
    )
    return ref, data


class LongPrompts:
    """The object bucket, as a gateway uses it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def store(self, ref: PromptRef, data: bytes, *, timeout_s: float) -> None:
        """Have JetStream's word that it holds `data`; its size has a time of its own.

        Raises:
            Transient: it does not, or it is not known.
        """
        limit_s = timeout_s + len(data) / BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                await self._bus.put_object(PROMPTS, ref.name, data)
        except TimeoutError as err:
            raise BusAway(f"the prompt was not stored within {limit_s:.1f} s") from err

    async def take_back(self, ref: PromptRef) -> None:
        """Delete a prompt whose request was not accepted."""
        with suppress(Transient, TimeoutError):
            async with asyncio.timeout(_TAKE_BACK_S):
                await self._bus.delete_object(PROMPTS, ref.name)

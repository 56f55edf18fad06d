"""The port: what a tier must do.

A tier keeps entries by name and knows nothing of what is in them: the stack frames and checks them.
Entries never change, so a tier may lose any of them at any time, and may be shared by many workers.
A tier either answers or raises `TierAway` within `timeout_s`; the stack makes a miss of that.
"""

from collections.abc import Sequence
from typing import Protocol

from diptych_contracts.errors import TierAway, TierFull
from diptych_contracts.tiers import TierKey, TierUsage

__all__ = ["Entry", "Tier", "TierAway", "TierFull", "TierKey", "TierUsage"]

Entry = bytes | memoryview
"""A framed entry. A memoryview is contiguous and nobody changes what is under it."""


class Tier(Protocol):
    """A store of entries."""

    @property
    def name(self) -> str:
        """Which store, without secrets; unique in a stack."""
        ...

    @property
    def timeout_s(self) -> float:
        """Longest a call for one entry takes before it has answered or raised."""
        ...

    @property
    def at_once(self) -> int:
        """How many are let in to read at once; as many again may write, look after it or forget."""
        ...

    @property
    def guess_bytes_per_s(self) -> float:
        """How fast such a store is taken to be read before that is measured."""
        ...

    async def open(self) -> None:
        """Get ready: called once before all else, and again while it raises `TierAway`."""
        ...

    async def sizes(self, keys: Sequence[TierKey]) -> Sequence[int]:
        """Bytes of the entries of the first keys, up to the first that is absent.

        A promise of nothing: what is there now may be gone when it is read.
        """
        ...

    async def get(self, key: TierKey) -> Entry | None:
        """The entry, or None."""
        ...

    async def put(self, key: TierKey, data: Entry) -> None:
        """Store an entry; what is there under this name may stay.

        Raises:
            TierFull: there is no room for it.
        """
        ...

    async def drop(self, key: TierKey) -> None:
        """Remove one entry; nothing happens if it is gone."""
        ...

    async def forget(self, tenant_tag: str) -> int:
        """Remove all entries of a tenant; gives how many there were, as far as the store says."""
        ...

    async def tend(self) -> None:
        """Look after the budget and leftovers: called about once a minute."""
        ...

    def usage(self) -> TierUsage:
        """Entries, bytes and budget; what the stack counts is left at its default."""
        ...

    async def close(self) -> None:
        """Let go of files and connections. Entries stay where they outlive a process."""
        ...

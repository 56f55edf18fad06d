"""Only one governor acts: the one that holds the key `governor` in bucket `leases`."""

from collections.abc import Callable

from diptych_bus.port import Bucket
from diptych_contracts.errors import Conflict, Transient
from diptych_contracts.ids import Incarnation
from diptych_contracts.power import GovernorLease

KEY = "governor"


class Leadership:
    """One process's hold on the key, by compare-and-swap.

    It may act while its last *confirmed* write is younger than the key's TTL: by then nobody else
    can have taken it. The age counts from before the write was sent.
    """

    def __init__(
        self,
        bucket: Bucket[GovernorLease],
        me: Incarnation,
        *,
        ttl_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._bucket = bucket
        self._lease = GovernorLease(governor=me)
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._revision: int | None = None
        self.epoch = 0
        """The revision at which this process took the key: it rises from governor to governor."""
        self._confirmed_s = now_s() - ttl_s

    @property
    def held(self) -> bool:
        """Whether this process may act now."""
        return self._revision is not None and self._age_s < self._ttl_s

    async def hold(self) -> bool:
        """Take the key if it is free, renew it after a third of its life; whether it is held."""
        if not self.held or self._age_s >= self._ttl_s / 3:
            began_s = self._now_s()
            try:
                await self._take()
                self._confirmed_s = began_s
            except Conflict:
                await self._read_back()
            except Transient:
                pass  # Unknown: what was confirmed still counts, and the next turn tries again.
        return self.held

    async def let_go(self) -> None:
        """Free the key for the next governor at once, if it is held."""
        if self.held:
            self._revision = None
            await self._bucket.delete(KEY)

    @property
    def _age_s(self) -> float:
        return self._now_s() - self._confirmed_s

    async def _take(self) -> None:
        took = self._revision is None
        self._revision = await self._write()
        if took:
            self.epoch = self._revision

    async def _write(self) -> int:
        if self._revision is None:
            return await self._bucket.create(KEY, self._lease, ttl_s=self._ttl_s)
        return await self._bucket.update(KEY, self._lease, self._revision, ttl_s=self._ttl_s)

    async def _read_back(self) -> None:
        """Somebody wrote first: another governor, or this one in a write it never heard of."""
        self._revision = None
        try:
            kept = await self._bucket.get(KEY)
        except Transient:
            return
        if kept is not None and kept.value == self._lease:
            self._revision = self.epoch = kept.revision

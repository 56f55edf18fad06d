"""What a tier holds and what gives way first, by bytes and by last use (pure)."""

from collections import OrderedDict
from collections.abc import Iterator

from diptych_kvtiers.port import TierKey


class Shelf:
    """Names and sizes within a budget, the least recently used first."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.n_bytes = 0
        self._sizes: OrderedDict[TierKey, int] = OrderedDict()
        self._of: dict[str, set[TierKey]] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: TierKey) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[TierKey]:
        return iter(self._sizes)

    def size(self, key: TierKey) -> int | None:
        """Bytes of an entry."""
        return self._sizes.get(key)

    def fits(self, n_bytes: int) -> bool:
        """Whether an entry of that size can be held at all."""
        return n_bytes <= self.budget_bytes

    def add(self, key: TierKey, n_bytes: int) -> list[TierKey]:
        """Hold an entry, the most recently used; gives those that have to go for it."""
        self.remove(key)
        self._sizes[key] = n_bytes
        self._of.setdefault(key.tenant_tag, set()).add(key)
        self.n_bytes += n_bytes
        return self._over(self.budget_bytes, kept=key)

    def touch(self, key: TierKey) -> None:
        """It was used."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: TierKey) -> bool:
        """Whether it was held."""
        n_bytes = self._sizes.pop(key, None)
        if n_bytes is None:
            return False
        self.n_bytes -= n_bytes
        own = self._of[key.tenant_tag]
        own.discard(key)
        if not own:
            del self._of[key.tenant_tag]
        return True

    def remove_tenant(self, tenant_tag: str) -> list[TierKey]:
        """All of a tenant's."""
        gone = list(self._of.get(tenant_tag, ()))
        for key in gone:
            self.remove(key)
        return gone

    def make_room(self, n_bytes: int) -> list[TierKey]:
        """The least recently used that are that large together; they are held no more."""
        return self._over(max(0, self.n_bytes - n_bytes), kept=None)

    def _over(self, limit_bytes: int, kept: TierKey | None) -> list[TierKey]:
        gone: list[TierKey] = []
        while self.n_bytes > limit_bytes:
            oldest = next(iter(self._sizes))
            if oldest == kept:
                break
            self.remove(oldest)
            gone.append(oldest)
        return gone

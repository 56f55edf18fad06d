"""Which tenants were ordered to be forgotten, and after what (pure).

Work takes the count of orders when it begins; what it has in hand is over if an order to forget its
tenant has come since. So nothing that was under way when a tenant was forgotten is stored again.
"""

from collections import OrderedDict

_REMEMBERED = 10_000
"""Orders; work under way is seconds old, and so many do not come in that time."""


class Orders:
    """To forget tenants."""

    def __init__(self) -> None:
        self.count = 0
        self._newest: OrderedDict[str, int] = OrderedDict()

    def give(self, tenant_tag: str) -> None:
        """Forget this tenant."""
        self.count += 1
        self._newest[tenant_tag] = self.count
        self._newest.move_to_end(tenant_tag)
        if len(self._newest) > _REMEMBERED:
            self._newest.popitem(last=False)

    def is_over(self, tenant_tag: str, count: int) -> bool:
        """Whether what began at that count may be stored no more."""
        return self._newest.get(tenant_tag, 0) > count

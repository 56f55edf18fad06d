"""Whose cached KV is whose, for an engine that keeps caches apart by a salt."""

import hashlib
from collections import OrderedDict

REMEMBERED = 4096
"""Tenants whose salts are recognised in what an engine tells of its cache."""


class Salts:
    """A salt per tenant: the same after a restart, and no other tenant can send it.

    Clients never reach the engine, so a salt needs to be apart, not secret.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, str] = OrderedDict()

    def salt(self, tenant: str) -> str:
        """The salt of `tenant`."""
        digest = hashlib.blake2b(tenant.encode(), digest_size=18, person=b"diptych-tenant")
        salt = digest.hexdigest()
        self._tenants[salt] = tenant
        self._tenants.move_to_end(salt)
        if len(self._tenants) > REMEMBERED:
            self._tenants.popitem(last=False)
        return salt

    def tenant(self, salt: str) -> str | None:
        """Whose salt it is; None: of nobody who asked lately."""
        return self._tenants.get(salt)

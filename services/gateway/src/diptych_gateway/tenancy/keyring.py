"""The API keys this gateway knows: bucket `keys`, watched, so that a change counts within a second.

While the bus is away it goes on with what it knows: nothing can be accepted then anyhow. One that
never saw the bucket does not start.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from diptych_bus.port import Bus, Gone, Kept, Subscription
from diptych_contracts.errors import Permanent, Transient
from diptych_contracts.keys import (
    KEY_PREFIX,
    ApiKey,
    KeyEntry,
    Tenant,
    digest,
    key_entry,
    tenant_entry,
)
from diptych_contracts.streams import KEYS
from diptych_gateway.errors import ApiError
from diptych_gateway.tenancy.callers import ANONYMOUS, Caller, Holder
from diptych_policy.access import Standing, anonymous, closes, is_loopback, standing
from diptych_telemetry import logger

MAX_KEY_CHARS = 512
_WHY = {
    Standing.REVOKED: "was revoked",
    Standing.EXPIRED: "has expired",
    Standing.PURGED: "belongs to a tenant that is no more",
}

log = logger(__name__)


class Keyring:
    """Who asks, by their key.

    Args:
        bus: Where the keys are, and whose clock says whether one has expired.
        host: What this gateway listens on.
        allowed: Whether its operator lets anybody in while there is no key.
    """

    def __init__(self, bus: Bus, *, host: str, allowed: bool) -> None:
        self._bus = bus
        self._host = host
        self._loopback = is_loopback(host)
        self._allowed = allowed
        self._entries: dict[str, KeyEntry] = {}
        self._of_tenant: dict[str, dict[str, ApiKey]] = {}
        self._callers: dict[str, tuple[ApiKey, Caller]] = {}
        """By the key's hash."""
        self._watch: Subscription | None = None
        self.loaded = False
        self.open = False
        """Whether those without a key are served."""
        self.anybody = ANONYMOUS
        """Who they are: their tenant may have limits."""

    async def start(self) -> None:
        """Learn the keys, and hear of every change from then on.

        Raises:
            Permanent: without a key this address must not be served.
            Transient: the bus does not answer.
        """
        bucket = self._bus.bucket(KEYS, cast("type[KeyEntry]", cast(Any, KeyEntry)))
        self._watch = await bucket.watch(self._on_change)
        self.loaded = True
        self._open_or_close()
        if self._closed_by:
            log.info("keys_known", keys=self.keys)
        elif self._loopback:
            log.info("serving_without_keys", host=self._host, reached_by="this machine alone")
        elif self._allowed:
            log.warning("serving_anybody_without_keys", host=self._host, reached_by="the network")
        else:
            raise Permanent(
                f"refusing to listen on {self._host} without an API key: anybody who reaches it "
                "could use it. Listen on 127.0.0.1, make a key there (`diptych keys create`), then "
                "come here; or set DIPTYCH_GATEWAY__ALLOW_ANONYMOUS=true if anybody may"
            )

    async def close(self) -> None:
        """Hear no more."""
        if self._watch is not None:
            await self._watch.close()

    @property
    def keys(self) -> int:
        """How many there are, counting or not."""
        return len(self._callers)

    @property
    def entries(self) -> list[KeyEntry]:
        """All keys and tenants, the oldest first."""
        return sorted(self._entries.values(), key=lambda entry: entry.created_unix_ms)

    def stands(self, key: ApiKey) -> Standing:
        """How a key stands now."""
        return standing(key, self._tenant(key.tenant), now_unix_ms=self._bus.unix_ms())

    @property
    def _closed_by(self) -> int:
        """Entries that close the door to those without a key."""
        return sum(map(closes, self._entries.values()))

    def caller(self, key: str | None) -> Caller:
        """Who shows `key`; None: nobody shows any.

        Raises:
            ApiError: the key is missing, unknown, or counts no more (401).
            Transient: the keys are not known yet.
        """
        if not self.loaded:
            raise Transient("the API keys are not known yet")
        if self.open:
            return self.anybody
        if key is None:
            raise unauthenticated(
                "no API key was given: send one as 'Authorization: Bearer <key>'"
                if self._callers
                else "this gateway has no API keys yet and serves nobody without one: "
                "its operator makes one with 'diptych keys create'"
            )
        found = self._callers.get(digest(key)) if len(key) <= MAX_KEY_CHARS else None
        if found is None:
            raise unauthenticated(f"the API key {_shown(key)} is not one of this server's")
        self._judge(found[0])
        return found[1]

    def renewed(self, caller: Caller) -> Caller:
        """The caller as it stands now: a connection may be older than a change of its key.

        Raises what `caller` raises.
        """
        if caller.anonymous and self.open:
            return self.anybody
        if not caller.sha256 and not caller.anonymous:
            return self._inside(caller)
        found = self._callers.get(caller.sha256)
        if found is None:
            raise unauthenticated(
                "the API key of this connection is no longer one of this server's"
            )
        self._judge(found[0])
        return found[1]

    def _judge(self, key: ApiKey) -> None:
        now_unix_ms = self._bus.unix_ms() if key.expires_unix_ms else 0
        stands = standing(key, self._tenant(key.tenant), now_unix_ms=now_unix_ms)
        if stands is not Standing.GOOD:
            raise unauthenticated(f"the API key {key.shown}… {_WHY[stands]}")

    def _on_change(self, change: Kept[KeyEntry] | Gone) -> None:
        """One entry is as told: perhaps as before, when the bucket is listed again."""
        entry = None if isinstance(change, Gone) else change.value
        before = self._entries.get(change.key)
        if entry == before or (entry is not None and change.key != _place(entry)):
            return
        if isinstance(before, ApiKey):
            self._drop_key(before)
        if entry is None:
            del self._entries[change.key]
        else:
            self._entries[change.key] = entry
        if isinstance(entry, ApiKey):
            self._of_tenant.setdefault(entry.tenant, {})[change.key] = entry
            self._callers[entry.sha256] = (entry, self._called(entry))
        elif isinstance(tenant := entry or before, Tenant):
            if tenant.tenant == ANONYMOUS.tenant:
                self.anybody = replace(ANONYMOUS, holders=_limited(self._tenant(tenant.tenant)))
            for key in self._of_tenant.get(tenant.tenant, {}).values():
                self._callers[key.sha256] = (key, self._called(key))
        if self.loaded:
            self._open_or_close()
            log.info("keys_changed", entry=change.key, gone=entry is None, keys=self.keys)

    def _drop_key(self, key: ApiKey) -> None:
        self._callers.pop(key.sha256, None)
        self._of_tenant[key.tenant].pop(key_entry(key.key_id))
        if not self._of_tenant[key.tenant]:
            del self._of_tenant[key.tenant]

    def _tenant(self, name: str) -> Tenant | None:
        entry = self._entries.get(tenant_entry(name))
        return entry if isinstance(entry, Tenant) else None

    def _open_or_close(self) -> None:
        self.open = anonymous(keys=self._closed_by, loopback=self._loopback, allowed=self._allowed)

    def _inside(self, caller: Caller) -> Caller:
        """One that asks from inside, with the limits of its tenant as they are now."""
        tenant = self._tenant(caller.tenant)
        if tenant is not None and tenant.purged_unix_ms:
            raise unauthenticated(f"the tenant '{caller.tenant}' is no more")
        return replace(caller, holders=_limited(tenant))

    def _called(self, key: ApiKey) -> Caller:
        own = () if key.limits.unlimited else (Holder(key_entry(key.key_id), key.limits),)
        return Caller(
            tenant=key.tenant,
            key_id=key.key_id,
            role=key.role,
            sha256=key.sha256,
            holders=own + _limited(self._tenant(key.tenant)),
        )


Renew = Callable[[Caller], Caller]


def _limited(tenant: Tenant | None) -> tuple[Holder, ...]:
    """The limits of a tenant, if it has any."""
    if tenant is None or tenant.limits.unlimited:
        return ()
    return (Holder(tenant_entry(tenant.tenant), tenant.limits),)


def _place(entry: KeyEntry) -> str:
    """Where the bucket holds an entry."""
    if isinstance(entry, ApiKey):
        return key_entry(entry.key_id)
    return tenant_entry(entry.tenant)


def unauthenticated(text: str) -> ApiError:
    """A 401."""
    error = ApiError(401, text, code="invalid_api_key")
    error.more_headers.append((b"www-authenticate", b"Bearer"))
    return error


def _shown(key: str) -> str:
    """A wrong key, so far as it may be repeated: perhaps it is right elsewhere."""
    return f"'{KEY_PREFIX}…'" if key.startswith(KEY_PREFIX) else "that was given"

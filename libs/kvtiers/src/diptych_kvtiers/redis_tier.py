"""Entries in Redis or Valkey: shared by a fleet, in a server's memory, so for small blocks.

The budget is the server's (`maxmemory`, with a policy that lets keys give way); every entry also
ends after `ttl_s`, so that a server without a policy does not fill with what nobody reads.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError

from diptych_kvtiers.port import Entry, TierAway, TierFull, TierKey, TierUsage
from diptych_kvtiers.specs import shown

_CONNECTIONS = 16
_SCANNED = 1000
DAY_S = 86_400
MAX_ENTRY_BYTES = 64 * 1024**2


class RedisTier:
    """One server, by its URL: `redis://`, or `rediss://` with TLS."""

    at_once = 8
    guess_bytes_per_s = 3e8

    def __init__(self, url: str, *, ttl_s: int = DAY_S, timeout_s: float = 0.5) -> None:
        self.name = shown(url)
        self.timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._used_bytes: int | None = None
        self._budget_bytes: int | None = None
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
        )
        self._redis = Redis.from_pool(pool)

    async def open(self) -> None:
        """Ask the server whether it is there."""
        await self.tend()

    async def sizes(self, keys: Sequence[TierKey]) -> list[int]:
        """See the port; one round trip."""
        async with _told():
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.strlen(_name(key))
            lengths = await pipe.execute()
        found: list[int] = []
        for n_bytes in lengths:
            if not n_bytes:  # absent: no entry is empty
                break
            found.append(int(n_bytes))
        return found

    async def get(self, key: TierKey) -> Entry | None:
        """See the port."""
        async with _told():
            data = await self._redis.get(_name(key))
        return data if isinstance(data, bytes) else None

    async def put(self, key: TierKey, data: Entry) -> None:
        """See the port."""
        if len(data) > MAX_ENTRY_BYTES:
            raise TierFull(f"{len(data)} bytes, at most {MAX_ENTRY_BYTES} go into Redis")
        async with _told():
            await self._redis.set(_name(key), data, ex=self._ttl_s)

    async def drop(self, key: TierKey) -> None:
        """See the port."""
        async with _told():
            await self._redis.unlink(_name(key))

    async def forget(self, tenant_tag: str) -> int:
        """See the port; looks at every key of the server, a thousand at a time."""
        gone = 0
        async with _told():
            names: list[bytes] = []
            async for name in self._redis.scan_iter(f"kv1:{tenant_tag}:*", count=_SCANNED):
                names.append(name)
                if len(names) >= _SCANNED:
                    gone += int(await self._redis.unlink(*names))
                    names.clear()
            if names:
                gone += int(await self._redis.unlink(*names))
        return gone

    async def tend(self) -> None:
        """Ask for what the server uses, of how much."""
        async with _told():
            info = await self._redis.info("memory")
        self._used_bytes = int(info["used_memory"])
        self._budget_bytes = int(info.get("maxmemory", 0)) or None

    def usage(self) -> TierUsage:
        """See the port: bytes and budget are of the whole server."""
        return TierUsage(name=self.name, bytes=self._used_bytes, budget_bytes=self._budget_bytes)

    async def close(self) -> None:
        """Close the connections."""
        async with _told():
            await self._redis.aclose()


def _name(key: TierKey) -> str:
    return f"kv1:{key.tenant_tag}:{key.block}"


@contextlib.asynccontextmanager
async def _told() -> AsyncIterator[None]:
    try:
        yield
    except OutOfMemoryError as err:
        raise TierFull(f"{err}") from err
    except (RedisError, OSError) as err:  # a timeout of its sockets is one of them
        raise TierAway(f"{type(err).__name__}: {err!s:.200}") from err

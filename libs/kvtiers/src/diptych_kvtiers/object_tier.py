"""Entries in an object store: S3 and what speaks like it, GCS, Azure, or a directory on a network.

Names are `<prefix>/<tenant tag>/<block>`. Credentials come from where `obstore` looks for them: the
provider's own variables (`AWS_ACCESS_KEY_ID` …) or the machine's role. With a budget, what was
written first is removed about once a minute; without one the bucket's own rules decide.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import ObjectStore, from_url

from diptych_contracts.tiers import BLOCK_CHARS, TENANT_TAG_CHARS, is_hex
from diptych_kvtiers.port import Entry, TierAway, TierFull, TierKey, TierUsage
from diptych_kvtiers.specs import shown
from diptych_kvtiers.staged_files import remove_staged

MAX_ENTRY_BYTES = 256 * 1024**2
"""No block is larger: what is, is not read into memory to see what it is."""
_AT_ONCE = 16
_LISTED = 1000
_KEPT_FRAC = 0.9
"""What is left of a budget after a sweep: else every entry would be one."""


class _Listed(NamedTuple):
    written: datetime
    path: str
    n_bytes: int


class ObjectTier:
    """A prefix of a bucket, by its URL."""

    at_once = 16
    guess_bytes_per_s = 5e7

    def __init__(
        self,
        url: str,
        *,
        budget_bytes: int | None = None,
        timeout_s: float = 5.0,
        endpoint: str = "",
        region: str = "",
    ) -> None:
        """Raises `ValueError` if `url` or the options are not what the store's provider needs."""
        self.name = shown(url)
        self.timeout_s = timeout_s
        self._budget_bytes = budget_bytes
        self._entries: int | None = None
        self._bytes: int | None = None
        self._evicted = 0
        self._folder = _folder(url)
        try:
            self._store = _opened(url, timeout_s=timeout_s, endpoint=endpoint, region=region)
        except BaseError as err:
            raise ValueError(f"{self.name}: {err!s:.300}") from err

    async def open(self) -> None:
        """Find out whether it answers, and what is there."""
        await self.tend()

    async def sizes(self, keys: Sequence[TierKey]) -> list[int]:
        """See the port; a question for each key, sixteen at once."""
        found: list[int] = []
        async with _told():
            for start in range(0, len(keys), _AT_ONCE):
                some = keys[start : start + _AT_ONCE]
                for n_bytes in await asyncio.gather(*(self._size(key) for key in some)):
                    if n_bytes is None:
                        return found
                    found.append(n_bytes)
        return found

    async def _size(self, key: TierKey) -> int | None:
        try:
            return (await obstore.head_async(self._store, _path(key)))["size"]
        except (NotFoundError, FileNotFoundError):
            return None

    async def get(self, key: TierKey) -> Entry | None:
        """See the port."""
        async with _told():
            try:
                found = await obstore.get_async(self._store, _path(key))
                if found.meta["size"] > MAX_ENTRY_BYTES:
                    return None
                return memoryview(await found.bytes_async())
            except (NotFoundError, FileNotFoundError):
                return None

    async def put(self, key: TierKey, data: Entry) -> None:
        """See the port."""
        if len(data) > MAX_ENTRY_BYTES:
            raise TierFull(f"{len(data)} bytes, at most {MAX_ENTRY_BYTES} are read back")
        async with _told():
            await obstore.put_async(self._store, _path(key), bytes(data), use_multipart=False)

    async def drop(self, key: TierKey) -> None:
        """See the port."""
        async with _told():
            await self._delete([_path(key)])

    async def forget(self, tenant_tag: str) -> int:
        """See the port."""
        async with _told():
            own = [listed.path for listed in await self._list(tenant_tag)]
            await self._delete(own)
            if self._folder is not None:
                await asyncio.to_thread(remove_staged, self._folder / tenant_tag, older_s=0.0)
        return len(own)

    async def tend(self) -> None:
        """Count what is there, and remove what was written first beyond the budget."""
        async with _told():
            listed = sorted(await self._list(None))
            n_bytes, gone = sum(entry.n_bytes for entry in listed), 0
            if self._budget_bytes is not None and n_bytes > self._budget_bytes:
                while n_bytes > _KEPT_FRAC * self._budget_bytes:
                    n_bytes -= listed[gone].n_bytes
                    gone += 1
            await self._delete([entry.path for entry in listed[:gone]])
            if self._folder is not None:
                await asyncio.to_thread(remove_staged, self._folder)
        self._entries, self._bytes = len(listed) - gone, n_bytes
        self._evicted += gone

    async def _list(self, tenant_tag: str | None) -> list[_Listed]:
        found: list[_Listed] = []
        async for some in obstore.list(self._store, prefix=tenant_tag, chunk_size=_LISTED):
            found += [
                _Listed(meta["last_modified"], meta["path"], meta["size"])
                for meta in some
                if _is_ours(meta["path"])
            ]
        return found

    async def _delete(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), _LISTED):
            with contextlib.suppress(NotFoundError, FileNotFoundError):
                await obstore.delete_async(self._store, paths[start : start + _LISTED])

    def usage(self) -> TierUsage:
        """See the port: of the whole prefix, as last listed."""
        return TierUsage(
            name=self.name,
            entries=self._entries,
            bytes=self._bytes,
            budget_bytes=self._budget_bytes,
            evicted=self._evicted,
        )

    async def close(self) -> None:
        """Nothing to do: connections go with the store."""


def _folder(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _opened(url: str, *, timeout_s: float, **given: str) -> ObjectStore:
    scheme = urlsplit(url).scheme
    if (folder := _folder(url)) is not None:
        with contextlib.suppress(OSError):  # It says better what is wrong.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return from_url(url, mkdir=True)
    if scheme == "memory":
        return from_url(url)
    limit = timedelta(seconds=timeout_s)
    options: dict[str, Any] = {
        "config": {name: value for name, value in given.items() if value},
        "client_options": {
            "timeout": limit,
            "connect_timeout": limit,
            "allow_http": given["endpoint"].startswith("http://"),
        },
        "retry_config": {"max_retries": 1, "retry_timeout": limit},
    }
    store: ObjectStore = from_url(url, **options)
    return store


def _path(key: TierKey) -> str:
    return f"{key.tenant_tag}/{key.block}"


def _is_ours(path: str) -> bool:
    tenant_tag, _, block = path.partition("/")
    return is_hex(tenant_tag, TENANT_TAG_CHARS) and is_hex(block, BLOCK_CHARS)


@contextlib.asynccontextmanager
async def _told() -> AsyncIterator[None]:
    try:
        yield
    except (BaseError, OSError) as err:
        raise TierAway(f"{type(err).__name__}: {err!s:.200}") from err

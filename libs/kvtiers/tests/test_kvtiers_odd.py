"""What does not belong where entries are, and what comes when nobody waits for it any more."""

import asyncio
import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych_contracts.errors import TierAway, TierFull
from diptych_kvtiers import disk_files, memcached_tier
from diptych_kvtiers.bus_tier import BusTier
from diptych_kvtiers.disk_files import DiskFiles
from diptych_kvtiers.disk_tier import DiskTier
from diptych_kvtiers.host_tier import HostTier
from diptych_kvtiers.memcached_tier import MemcachedTier
from diptych_kvtiers.object_tier import ObjectTier
from diptych_kvtiers.stack import TierStack
from diptych_testkit.tier_suite import WAIT_S, tier_block, tier_key

KEYS = [tier_key(n) for n in range(4)]
TENANT = KEYS[0].tenant_tag


async def opened(root: Path) -> DiskTier:
    tier = DiskTier(root, 1 << 30, timeout_s=WAIT_S)
    await tier.open()
    return tier


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def placed(files: DiskFiles, what: str) -> Path:
    """Something that is no entry, under an entry's name."""
    path = files.path(KEYS[0])
    path.parent.mkdir(parents=True)
    match what:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/etc/hostname")
        case "loop":
            path.symlink_to(path)
        case "folder":
            (path / "deep").mkdir(parents=True)
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
    return path


@pytest.mark.parametrize("what", ["pipe", "link", "loop", "folder", "huge"])
async def test_what_is_no_entry_is_a_miss_and_gives_way(what: str, tmp_path: Path) -> None:
    """A named pipe kept a thread for ever, a link had the whole tier left alone."""
    tier = await opened(tmp_path)
    path = placed(tier._files, what)
    async with asyncio.timeout(WAIT_S):
        assert await tier.sizes(KEYS[:1]) == []
        assert await tier.get(KEYS[0]) is None
        await tier._scan()
        assert tier.usage().entries == 0
        await tier.put(KEYS[0], tier_block(0))
        assert await tier.get(KEYS[0]) == tier_block(0)
    assert stat.S_ISREG(path.lstat().st_mode)
    await tier.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
async def test_one_file_that_cannot_be_read_is_a_miss_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector under a block that many prompts begin with had the tier left alone each time."""
    tier = await opened(tmp_path)
    for n in range(2):
        await tier.put(KEYS[n], tier_block(n))
    read = DiskFiles._read
    bad = tier._files.path(KEYS[0])

    def broken(files: DiskFiles, path: Path) -> bytes | None:
        if path == bad:
            raise OSError(number, os.strerror(number))
        return read(files, path)

    monkeypatch.setattr(DiskFiles, "_read", broken)
    assert await tier.get(KEYS[0]) is None
    assert not bad.exists()
    assert await tier.get(KEYS[1]) == tier_block(1)
    with monkeypatch.context() as patch:

        def read_only(_path: Path, **_more: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        await tier.put(KEYS[0], tier_block(0))
        patch.setattr(Path, "unlink", read_only)
        with pytest.raises(TierAway):
            await tier.get(KEYS[0])
    await tier.close()


async def test_out_of_descriptors_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await opened(tmp_path)
    await tier.put(KEYS[0], tier_block(0))

    def none_left(_files: DiskFiles, _path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(DiskFiles, "_read", none_left)
        with pytest.raises(TierAway):
            await tier.get(KEYS[0])
    assert await tier.get(KEYS[0]) == tier_block(0)
    await tier.close()


def test_leftovers_of_a_clock_that_was_ahead_are_swept(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.prepare()
    now_s = time.time()
    for name, at_s in (("old", now_s - 3600), ("ahead", now_s + 3600), ("new", now_s)):
        (tmp_path / "new" / name).touch()
        os.utime(tmp_path / "new" / name, (at_s, at_s))
    files.sweep()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["new"]


def test_use_counts_though_the_clock_went_back(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.prepare()
    files.write(KEYS[0], b"entry")
    ahead_s = time.time() + 1e6
    os.utime(files.path(KEYS[0]), (ahead_s, ahead_s))
    assert files.read(KEYS[0]) == b"entry"
    assert files.path(KEYS[0]).stat().st_mtime < ahead_s - 1e5


def test_two_workers_remove_one_tenant_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's sweep took the files away: "out of reach", though all was removed."""
    files = DiskFiles(tmp_path)
    files.prepare()
    files.write(KEYS[0], b"entry")
    rmtree = shutil.rmtree

    def twice(path: str, **more: bool) -> None:
        rmtree(path, **more)  # type: ignore[arg-type]
        rmtree(path)

    monkeypatch.setattr(disk_files.shutil, "rmtree", twice)
    assert files.forget(TENANT) == 1
    assert not list((tmp_path / "gone").iterdir())


def test_what_could_not_be_removed_is_not_told_as_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = DiskFiles(tmp_path)
    files.prepare()
    files.write(KEYS[0], b"entry")

    def not_permitted(_path: str, **_more: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(disk_files.shutil, "rmtree", not_permitted)
        for _ in range(2):
            with pytest.raises(TierAway):
                files.forget(TENANT)
    files.forget(TENANT)
    assert not list((tmp_path / "gone").iterdir())


class Held:
    """What memcached keeps; the write of a head waits."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.begun, self.go = threading.Event(), threading.Event()

    def set(self, name: str, value: bytes, **_more: object) -> bool:
        if name.count(".") == 2:
            self.begun.set()
            self.go.wait(WAIT_S)
        self.items[name] = value
        return True

    def delete(self, name: str, **_more: object) -> None:
        self.items.pop(name, None)

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MemcachedTier, Held]]:
    tier, server = MemcachedTier("127.0.0.1", 1), Held()
    monkeypatch.setattr(tier, "_client", server)
    monkeypatch.setattr(memcached_tier, "all_keys", lambda *_where, **_more: list(server.items))
    yield tier, server
    server.go.set()


async def test_what_memcached_takes_late_is_forgotten_too(
    held: tuple[MemcachedTier, Held],
) -> None:
    """Its writer had given up; the head came after the tenant's keys were listed."""
    tier, server = held
    putting = asyncio.create_task(tier.put(KEYS[0], tier_block(0)))
    assert await asyncio.to_thread(server.begun.wait, WAIT_S)
    putting.cancel()
    await asyncio.wait([putting])
    forgetting = asyncio.create_task(tier.forget(TENANT))
    await asyncio.wait([forgetting], timeout=0.2)
    server.go.set()
    await forgetting
    await asyncio.to_thread(tier._threads.shutdown, wait=True)
    assert server.items == {}


async def test_an_empty_object_is_no_entry() -> None:
    """It was divided by its length."""

    class Objects:
        async def put_object(self, _bucket: str, _name: str, _data: bytes) -> None:
            """Nothing is kept."""

        async def get_object(self, _bucket: str, _name: str) -> bytes | None:
            return b""

        async def delete_object(self, _bucket: str, _name: str) -> None:
            """Nothing is there."""

        async def object_names(self, _bucket: str) -> list[str]:
            return [f"{KEYS[0].tenant_tag}.{KEYS[0].block}"]

    tier = BusTier(Objects(), 1 << 20)
    await tier.open()
    assert await tier.get(KEYS[0]) is None
    await tier.tend()
    assert tier.usage().entries == 1


async def test_objects_in_a_folder_are_their_owners(tmp_path: Path) -> None:
    root = tmp_path / "some where" / "kv"
    tier = ObjectTier(f"file://{str(root).replace(' ', '%20')}")
    await tier.put(KEYS[0], tier_block(0))
    assert await tier.get(KEYS[0]) == tier_block(0)
    assert root.stat().st_mode & 0o777 == 0o700


async def test_what_a_killed_writer_left_in_a_folder_is_swept_and_forgotten(tmp_path: Path) -> None:
    """`obstore` lists and deletes no file of such a name: a purged tenant's KV stayed for ever."""
    tier = ObjectTier(tmp_path.as_uri())
    await tier.put(KEYS[0], tier_block(0))
    other = tier_key(0, "other")
    await tier.put(other, tier_block(0))
    names = [f"{key.tenant_tag}/{key.block}" for key in (KEYS[0], other)]
    old, new = (tmp_path / f"{names[0]}#1"), (tmp_path / f"{names[0]}#2")
    for path in (old, new, tmp_path / f"{names[1]}#1"):
        path.write_bytes(b"what a user wrote")
    os.utime(old, (1000, 1000))
    await tier.tend()
    assert not old.exists()
    assert new.exists()
    assert await tier.forget(TENANT) == 1
    assert files(tmp_path) == [names[1], f"{names[1]}#1"]


async def test_what_is_far_too_large_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = ObjectTier(tmp_path.as_uri())
    await tier.put(KEYS[0], bytes(2000))
    monkeypatch.setattr("diptych_kvtiers.object_tier.MAX_ENTRY_BYTES", 1000)
    assert await tier.get(KEYS[0]) is None
    with pytest.raises(TierFull):
        await tier.put(KEYS[1], bytes(2000))


async def test_what_was_begun_before_a_purge_is_stored_nowhere() -> None:
    tier = HostTier(1 << 30)
    stack = TierStack([tier])
    await stack.start()
    begun = stack.orders
    await stack.forget(TENANT)
    assert not stack.put(KEYS[0], tier_block(0), orders=begun)
    assert stack.put(KEYS[1], tier_block(1), orders=stack.orders)
    assert stack.put(tier_key(0, "other"), tier_block(0), orders=begun)
    assert await stack.flush(WAIT_S)
    assert list(tier._entries) == [KEYS[1], tier_key(0, "other")]
    await stack.close()

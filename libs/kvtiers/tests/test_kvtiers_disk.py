import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diptych_contracts.errors import TierAway, TierFull
from diptych_kvtiers import disk_files
from diptych_kvtiers.disk_tier import DiskTier
from diptych_kvtiers.entry import Framer
from diptych_kvtiers.stack import StackLimits, TierStack
from diptych_testkit.tier_suite import WAIT_S, check_tier, tier_block, tier_key

KEYS = [tier_key(n) for n in range(200)]
GIB = 1 << 30


async def opened(root: Path, budget_bytes: int = GIB, leftover_s: float = 300.0) -> DiskTier:
    tier = DiskTier(root, budget_bytes, timeout_s=WAIT_S, leftover_s=leftover_s)
    await tier.open()
    return tier


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


async def test_a_directory_is_a_tier(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    await check_tier(tier)
    await tier.close()


async def test_entries_outlive_the_process(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    await first.put(KEYS[0], tier_block(0))
    await first.close()
    second = await opened(tmp_path)
    assert await second.get(KEYS[0]) == tier_block(0)
    assert second.usage().entries == 1
    await second.close()
    with pytest.raises(TierAway):
        await second.get(KEYS[0])


async def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    tier = await opened(tmp_path / "kv")
    await tier.put(KEYS[0], tier_block(0))
    await tier.close()
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    for folder in path.parents[:3]:
        assert folder.stat().st_mode & 0o777 == 0o700, folder


async def test_the_budget_is_kept_by_last_use(tmp_path: Path) -> None:
    size = disk_files.on_disk(100_000)
    tier = await opened(tmp_path, 3 * size)
    for n in range(3):
        await tier.put(KEYS[n], tier_block(n))
    await tier.get(KEYS[0])
    await tier.put(KEYS[3], tier_block(3))
    assert [await tier.get(key) is None for key in KEYS[:4]] == [False, True, False, False]
    usage = tier.usage()
    assert (usage.entries, usage.bytes, usage.evicted) == (3, 3 * size, 1)
    assert len(files(tmp_path)) == 3
    with pytest.raises(TierFull):
        await tier.put(KEYS[4], bytes(4 * size))
    await tier.close()


async def test_last_use_is_known_after_a_restart(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    for n in range(4):
        await tier.put(KEYS[n], tier_block(n))
    await tier.close()
    for n, path in enumerate(tier._files.path(KEYS[n]) for n in range(4)):
        os.utime(path, (1000 + n, 1000 + n))
    tier = await opened(tmp_path)
    await tier.get(KEYS[0])
    await tier.close()
    again = await opened(tmp_path, 3 * disk_files.on_disk(100_000))
    assert [await again.get(key) is None for key in KEYS[:4]] == [False, True, False, False]
    await again.close()


async def test_two_workers_share_a_directory(tmp_path: Path) -> None:
    size = disk_files.on_disk(100_000)
    one, two = await opened(tmp_path, 4 * size), await opened(tmp_path, 4 * size)
    await one.put(KEYS[0], tier_block(0))
    assert await two.get(KEYS[0]) == tier_block(0), "found without being known"
    await asyncio.gather(*(tier.put(KEYS[1], tier_block(1)) for tier in (one, two)))
    await two.drop(KEYS[0])
    assert await one.get(KEYS[0]) is None
    assert one.usage().entries == 1
    for n in range(2, 5):
        await one.put(KEYS[n], tier_block(n))
    for n in range(5, 8):
        await two.put(KEYS[n], tier_block(n))
    one._next_scan_s = 0.0
    await one.tend()
    assert len(files(tmp_path)) == 4, "a scan sees what the other wrote"
    assert await two.forget(KEYS[0].tenant_tag) == 4
    assert [await one.get(key) for key in KEYS[:8]] == [None] * 8
    await one.close()
    await two.close()


async def test_what_is_stored_while_a_scan_runs_is_known(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    await tier.put(KEYS[0], tier_block(0))
    await tier.put(KEYS[1], tier_block(1))
    scanned = tier._files.scan()
    tier._changes = {}
    await tier.put(KEYS[2], tier_block(2))
    await tier.drop(KEYS[0])
    tier._know(scanned, tier._changes)
    tier._changes = None
    assert set(tier._shelf) == {KEYS[1], KEYS[2]}
    await tier.close()


async def test_leftovers_of_a_crash_are_swept_and_live_writes_are_not(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    old, young = tmp_path / "new" / "old", tmp_path / "new" / "young"
    for path in (old, young):
        path.write_bytes(b"half an ent")
    os.utime(old, (time.time() - 301,) * 2)
    removed = tmp_path / "gone" / "x" / "aa"
    removed.mkdir(parents=True)
    (removed / KEYS[0].block).write_bytes(b"x")
    strange = tmp_path / "v1" / "readme.txt"
    strange.write_text("not ours")
    tier = await opened(tmp_path)
    assert files(tmp_path) == [young, strange]
    assert not (tmp_path / "gone" / "x").exists()
    assert tier.usage().entries == 0
    await tier.close()


@pytest.mark.parametrize("spoil", ["flip", "cut", "empty", "another's", "folder", "link"])
async def test_a_spoilt_file_is_a_miss(tmp_path: Path, spoil: str) -> None:
    tier = await opened(tmp_path)
    stack = TierStack([tier], limits=StackLimits(start_s=WAIT_S))
    await stack.start()
    for n in (0, 1):
        stack.put(KEYS[n], tier_block(n))
    assert await stack.flush(WAIT_S)
    path = tier._files.path(KEYS[0])
    good = path.read_bytes()
    match spoil:
        case "flip":
            path.write_bytes(good[:5000] + bytes([good[5000] ^ 4]) + good[5001:])
        case "cut":
            os.truncate(path, 5000)
        case "empty":
            os.truncate(path, 0)
        case "another's":
            path.write_bytes(Framer().framed(KEYS[1], tier_block(1)))
        case "folder":
            path.unlink()
            path.mkdir()
        case "link":
            path.unlink()
            path.symlink_to(tier._files.path(KEYS[1]))
    assert await stack.read(KEYS[:1], timeout_s=WAIT_S) == []
    if spoil in ("flip", "cut", "empty", "another's"):
        assert not path.exists(), "it is dropped"
        assert stack.usage()[0].corrupt == 1
        got = await stack.read(KEYS[1:2], timeout_s=WAIT_S)
        assert [bytes(block) for block in got] == [tier_block(1)], "the tier goes on"
    await stack.close()


_WRITER = """
import asyncio, sys
from pathlib import Path
from diptych_kvtiers.disk_tier import DiskTier
from diptych_kvtiers.stack import TierStack
from diptych_testkit.tier_suite import tier_block, tier_key

async def main():
    stack = TierStack([DiskTier(Path(sys.argv[1]), 1 << 30)])
    await stack.start()
    for n in range(200):
        stack.put(tier_key(n), tier_block(n, 1_000_000))
        if n == int(sys.argv[2]):
            print("so far", flush=True)
        await asyncio.sleep(0)
    await stack.flush(60)
    print("all", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def killed_while_writing(root: Path, after: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(root), str(after)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.kill()
        writer.wait()
    assert writer.returncode == -signal.SIGKILL


@pytest.mark.parametrize("after", [0, 3, 20, 60])
async def test_a_writer_that_is_killed_leaves_whole_entries_or_none(
    tmp_path: Path, after: int
) -> None:
    """SIGKILL in the middle of writing 200 MB, at four places."""
    await asyncio.to_thread(killed_while_writing, tmp_path, after)
    tier = await opened(tmp_path, leftover_s=0.0)
    assert list((tmp_path / "new").iterdir()) == [], "leftovers are swept"
    stack = TierStack([tier], limits=StackLimits(start_s=WAIT_S, find_s=WAIT_S))
    await stack.start()
    held = list(tier._shelf)
    for key in held:
        (block,) = await stack.read([key], timeout_s=WAIT_S)
        assert bytes(block) == tier_block(KEYS.index(key), 1_000_000)
    assert stack.usage()[0].corrupt == 0
    stack.put(tier_key(1000), b"goes on")
    assert await stack.flush(WAIT_S)
    (block,) = await stack.read([tier_key(1000)], timeout_s=WAIT_S)
    assert bytes(block) == b"goes on"
    await stack.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root, with the right to mount, has a disk that is full")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


async def test_a_full_disk_makes_room_by_what_is_ours(small_disk: Path) -> None:
    """The budget is larger than the disk."""
    tier = await opened(small_disk)
    for n in range(50):
        await tier.put(KEYS[n], tier_block(n))
    assert await tier.get(KEYS[49]) == tier_block(49)
    assert await tier.get(KEYS[0]) is None
    usage = tier.usage()
    assert usage.entries == len(files(small_disk)) >= 10
    assert usage.evicted == 50 - usage.entries
    await tier.close()


async def test_a_disk_filled_by_others_is_a_miss_and_can_be_read(small_disk: Path) -> None:
    tier = await opened(small_disk)
    stack = TierStack([tier], limits=StackLimits(start_s=WAIT_S))
    await stack.start()
    for n in range(3):
        stack.put(KEYS[n], tier_block(n))
    assert await stack.flush(WAIT_S)
    fill_up(small_disk / "of others")
    stack.put(KEYS[3], tier_block(3, 1_000_000))
    assert await stack.flush(WAIT_S)
    usage = stack.usage()[0]
    assert (usage.dropped, usage.errors) == (1, 1)
    assert "No space" in usage.away
    assert list((small_disk / "new").iterdir()) == []
    for entry in list(tier._shelf):
        (block,) = await stack.read([entry], timeout_s=WAIT_S)
        assert bytes(block) == tier_block(KEYS.index(entry))
    await stack.close()


async def test_a_limit_of_the_process_is_a_full_disk(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(TierFull):
            await tier.put(KEYS[0], tier_block(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == []
    assert tier.usage().entries == 0
    await tier.put(KEYS[0], tier_block(0))
    await tier.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE])
async def test_a_disk_that_fails_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = await opened(tmp_path)

    def fails(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_files.os, "open", fails)
    with pytest.raises(TierAway) as told:
        await tier.get(KEYS[0])
    assert os.strerror(number) in str(told.value)
    with pytest.raises(TierAway) as told:
        await tier.put(KEYS[0], tier_block(0))
    assert not isinstance(told.value, TierFull)
    monkeypatch.undo()
    assert tier.usage().entries == 0
    await tier.close()


async def test_a_directory_that_cannot_be_made_is_away(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TierAway, match="cannot make folders"):
        await opened(tmp_path / "file" / "kv")


async def test_a_directory_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    tier = await opened(root)
    await tier.put(KEYS[0], tier_block(0))
    root.rename(tmp_path / "elsewhere")
    assert await tier.get(KEYS[0]) is None
    assert await tier.sizes(KEYS) == []
    with pytest.raises(TierAway):
        await tier.put(KEYS[1], tier_block(1))
    await tier.close()


async def test_a_tenant_is_forgotten_after_a_write_that_nobody_waits_for(tmp_path: Path) -> None:
    """A write that its caller gave up on goes on in its thread: it must not come after."""
    tier = await opened(tmp_path)
    goes_on, write = asyncio.Event(), tier._files.write
    loop = asyncio.get_running_loop()

    def slow(*args: object) -> None:
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(WAIT_S)
        write(*args)  # type: ignore[arg-type]

    tier._files.write = slow  # type: ignore[method-assign]
    putting = asyncio.create_task(tier.put(KEYS[0], tier_block(0)))
    while not tier._writes:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    forgetting = asyncio.create_task(tier.forget(KEYS[0].tenant_tag))
    await asyncio.sleep(0.05)
    goes_on.set()
    await forgetting
    assert files(tmp_path) == []
    await tier.close()

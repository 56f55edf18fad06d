import fcntl
import gc
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import Incompatible, Permanent, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import SlotRef
from diptych_kvlink.lockfile import (
    SHM_DIRECTORY,
    create_locked,
    host_id,
    is_abandoned,
    private_folder,
    sweep_leftovers,
)
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.presence import Presence, Witness
from diptych_kvlink.shm import ShmPool, ShmWriter

SHAPE = PoolShape(slots=3, slot_bytes=5000)


@pytest.fixture
def pool(tmp_path: Path) -> Any:
    pool = ShmPool("decode-worker-1", SHAPE, tmp_path)
    yield pool
    pool.close()


def test_the_file_is_private_and_says_where_it_is(pool: ShmPool, tmp_path: Path) -> None:
    path = Path(pool.endpoint.address)

    assert path.parent == tmp_path
    assert path.name == "diptych-kv-decode-worker-1"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == SHAPE.total_bytes == 4096 + 3 * 8192
    assert pool.endpoint.host == host_id(tmp_path)


def test_bytes_written_by_one_map_are_read_by_the_other(pool: ShmPool, tmp_path: Path) -> None:
    writer = ShmWriter(pool.endpoint, tmp_path)
    pool.admit(1, 7)
    buffer = writer.buffer(SlotRef(slot=1, generation=7))
    buffer[:3] = b"abc"
    buffer[-1] = 9
    writer.send([(SlotRef(slot=1, generation=7), buffer)])

    assert bytes(pool.view(1, 4)) == b"abc\0"
    assert pool.view(1, 5000)[4999] == 9
    assert bytes(pool.view(0, 5000)) == bytes(pool.view(2, 5000)) == bytes(5000)
    writer.close()
    assert bytes(buffer[:3]) == b"abc"
    with pytest.raises(Refused, match="link is closed"):
        writer.buffer(SlotRef(slot=1, generation=7))


@pytest.mark.parametrize(
    "ref",
    [SlotRef(slot=0, generation=6), SlotRef(slot=3, generation=7), SlotRef(slot=-1, generation=7)],
)
def test_a_slot_that_is_not_the_writers_is_refused(
    pool: ShmPool, tmp_path: Path, ref: SlotRef
) -> None:
    writer = ShmWriter(pool.endpoint, tmp_path)
    pool.admit(0, 7)

    with pytest.raises(Refused):
        writer.buffer(ref)
    with pytest.raises(Refused):
        writer.send([(ref, memoryview(b"x"))])
    writer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "another-boot"}, "one host only"),
        ({"address": "/etc/diptych-kv-x"}, "expected a pool in"),
        ({"address": "{dir}/other"}, "expected a pool in"),
        ({"address": "{dir}/diptych-kv-none"}, "No such file"),
        ({"address": "{dir}/diptych-link"}, "Too many levels of symbolic links"),
        ({"address": "{dir}/diptych-dir"}, "Is a directory"),
        ({"address": "{dir}/diptych-\0"}, "cannot open the pool .*null"),
        ({"slots": -1}, "expected a pool of slots, got -1 of 5000 bytes"),
        ({"slot_bytes": 0}, "expected a pool of slots, got 3 of 0 bytes"),
        ({"slots": 4}, "expected 36864 bytes, got 28672"),
        ({"slot_bytes": 5001}, "not a pool of 3 slots of 5001 bytes"),
    ],
)
def test_an_endpoint_that_is_not_what_it_says_is_refused(
    pool: ShmPool, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "diptych-link").symlink_to(pool.endpoint.address)
    (tmp_path / "diptych-dir").mkdir()
    if "address" in changes:
        changes = {"address": changes["address"].format(dir=tmp_path)}

    with pytest.raises(Incompatible, match=message):
        ShmWriter(msgspec.structs.replace(pool.endpoint, **changes), tmp_path)


def test_a_pool_of_another_user_is_refused(
    pool: ShmPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(Incompatible, match="belongs to uid"):
        ShmWriter(pool.endpoint, tmp_path)


def test_a_slot_is_idle_unless_a_writer_has_it_open_under_that_generation(
    pool: ShmPool, tmp_path: Path
) -> None:
    writer, ref = ShmWriter(pool.endpoint, tmp_path), SlotRef(slot=1, generation=7)
    pool.admit(1, 7)
    assert pool.is_idle(ref)

    writer.buffer(ref)
    assert not pool.is_idle(ref)
    writer.stop(SlotRef(slot=1, generation=6))
    assert not pool.is_idle(ref)
    writer.stop(ref)
    assert pool.is_idle(ref)

    pool.admit(1, 0)
    with pytest.raises(Refused):
        writer.buffer(ref)
    assert pool.is_idle(ref)
    writer.close()
    writer.stop(ref)


def test_too_little_memory_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(Permanent, match=r"for 3 transfer slots .* No space left"):
        ShmPool("decode-worker-1", SHAPE, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_swept_and_what_lives_is_not(pool: ShmPool, tmp_path: Path) -> None:
    dead = tmp_path / "diptych-kv-decode-worker-dead"
    dead.write_bytes(b"x")
    stranger = tmp_path / "something-else"
    stranger.write_bytes(b"x")
    (tmp_path / "diptych-link").symlink_to(stranger)

    assert sweep_leftovers(tmp_path) == [dead.name]

    assert Path(pool.endpoint.address).exists()
    assert stranger.exists()


def test_the_next_pool_sweeps_the_last_ones_leftover(tmp_path: Path) -> None:
    dead = tmp_path / "diptych-kv-decode-worker-dead"
    dead.write_bytes(b"x")

    ShmPool("decode-worker-2", SHAPE, tmp_path).close()

    assert list(tmp_path.iterdir()) == []


def test_a_new_file_that_a_sweeper_takes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, calls = tmp_path / "diptych-kv-x", fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(operation)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    fd = create_locked(path)

    assert os.path.samestat(os.fstat(fd), path.stat())
    assert len(calls) == 2
    os.close(fd)


def test_a_name_in_use_is_refused(pool: ShmPool, tmp_path: Path) -> None:
    with pytest.raises(Permanent, match="File exists"):
        ShmPool("decode-worker-1", SHAPE, tmp_path)
    assert Path(pool.endpoint.address).exists()


def test_a_lock_tells_the_living_from_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "diptych-x"
    owner = create_locked(path)
    other = os.open(path, os.O_RDONLY)

    assert not is_abandoned(other)
    os.close(owner)
    assert is_abandoned(other)
    os.close(other)


def test_death_is_proved_even_after_the_file_is_swept(tmp_path: Path) -> None:
    name = Incarnation("prefill-worker-1")
    witness, presence = Witness(tmp_path), Presence(name, tmp_path)
    witness.expect(name)
    assert not witness.is_dead(name)

    presence.close()
    presence.close()

    assert not any(tmp_path.iterdir())
    assert witness.is_dead(name)
    assert witness.is_dead(name)
    witness.close()


def test_absence_is_not_death(tmp_path: Path) -> None:
    witness = Witness(tmp_path)

    witness.expect(Incarnation("prefill-worker-1"))

    assert not witness.is_dead(Incarnation("prefill-worker-1"))
    witness.close()


def test_a_witness_keeps_no_descriptor_of_the_dead(tmp_path: Path) -> None:
    gc.collect()
    witness = Witness(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        presence = Presence(Incarnation(f"prefill-worker-{number}"), tmp_path)
        witness.expect(Incarnation(f"prefill-worker-{number}"))
        presence.close()

    assert len(os.listdir("/proc/self/fd")) <= before + 1
    witness.close()
    assert len(os.listdir("/proc/self/fd")) <= before


# Other users of this machine


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "diptych-1000"
    here = host_id(folder)
    pool = ShmPool("decode-worker-1", SHAPE, folder)

    assert folder.stat().st_mode & 0o777 == 0o700
    assert host_id(folder) == here == pool.endpoint.host
    assert str(os.geteuid()) in SHM_DIRECTORY.name
    pool.close()


@pytest.mark.parametrize("what", ["open to others", "a link", "a file", "another's"])
def test_a_folder_that_others_reach_is_not_used(tmp_path: Path, what: str) -> None:
    """Who owns the folder can take its files away, and put others there."""
    folder = tmp_path / "diptych-1000"
    match what:
        case "open to others":
            folder.mkdir()
            folder.chmod(0o755)
        case "a link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        case "a file":
            folder.touch(mode=0o600)
        case _:
            folder.mkdir(mode=0o700)
            given_away(folder)
    for use in (
        lambda: private_folder(folder),
        lambda: ShmPool("decode-worker-1", SHAPE, folder),
        lambda: Presence(Incarnation("prefill-worker-1"), folder),
    ):
        with pytest.raises(Permanent, match=r"must be a folder of uid|cannot create"):
            use()


def test_a_pool_that_others_may_open_is_not_written(pool: ShmPool, tmp_path: Path) -> None:
    Path(pool.endpoint.address).chmod(0o660)
    with pytest.raises(Incompatible, match="open to other users: -rw-rw----"):
        ShmWriter(pool.endpoint, tmp_path)


def test_another_users_lock_file_proves_no_death(tmp_path: Path) -> None:
    """Made before the writer's own, unlocked: its slots would leave quarantine too early."""
    path = tmp_path / "diptych-writer-prefill-worker-1"
    path.touch(mode=0o644)
    witness, writer = Witness(tmp_path), Incarnation("prefill-worker-1")
    given_away(path)

    witness.expect(writer)

    assert not witness.is_dead(writer)
    witness.close()


def given_away(path: Path) -> None:
    try:
        os.chown(path, 65534, -1)
    except PermissionError:
        pytest.skip("needs root, to give a file to another user")

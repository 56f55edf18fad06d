"""The `shm` link: the reader's slots are shared memory, and the writer writes straight into them.

One copy per side: the engine exports into the slot and imports out of it. Nothing has to be sent.

Who may write is the kernel's to say: the pool is a file of mode 0600 in a folder of mode 0700, so
processes of this user reach it and no others (but root). Among those nothing stops a write; what
they cannot do is have it decoded: a hand-over needs the ticket, and the bytes their checksums.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from diptych_contracts.errors import LinkBroken, Refused
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.transfers import LinkEndpoint, SlotRef
from diptych_kvlink.lockfile import (
    PREFIX,
    create_locked,
    host_id,
    is_abandoned,
    private_folder,
    sweep_leftovers,
)
from diptych_kvlink.pool_file import PoolMap, PoolShape, make_pool, map_pool
from diptych_kvlink.port import CLOSED
from diptych_kvlink.presence import Witness

KIND = "shm"


class ShmPool:
    """The reader's side: a pool in a locked file, deleted on close or by the next sweep."""

    def __init__(self, name: str, shape: PoolShape, directory: Path) -> None:
        private_folder(directory)
        sweep_leftovers(directory)
        self._path = directory / f"{PREFIX}kv-{name}"
        self._fd: int | None = create_locked(self._path)
        try:
            self._map = make_pool(self._fd, self._path, shape)
        except BaseException:
            self._delete()
            raise
        self._witness = Witness(directory)
        self._endpoint = LinkEndpoint(
            kind=KIND,
            host=host_id(directory),
            address=str(self._path),
            slots=shape.slots,
            slot_bytes=shape.slot_bytes,
        )

    @property
    def endpoint(self) -> LinkEndpoint:
        """Where writers find the slots."""
        return self._endpoint

    @property
    def stops_writers(self) -> bool:
        """Never: a writer that is mid-copy goes on."""
        return False

    @property
    def slots(self) -> list[memoryview]:
        """The memory itself, for another link to receive into."""
        return self._map.slots()

    def admit(
        self,
        slot: int,
        generation: int,
        writer: Incarnation | None = None,
        transfer_id: TransferId | None = None,
    ) -> None:
        """From now on let in only writes under `generation`; 0 lets none in."""
        if self._fd is not None:
            self._map.gates[slot] = generation

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first `n_bytes` of a slot, read-only."""
        return self._map.slot(slot, n_bytes).toreadonly()

    def is_idle(self, ref: SlotRef) -> bool:
        """Whether no writer has the slot open under this generation."""
        return self._map.marks[ref.slot] != ref.generation

    def expect(self, writer: Incarnation, certificate: bytes = b"", agent: bytes = b"") -> None:
        """Remember `writer`, so that its death can be proved later."""
        self._witness.expect(writer)

    def is_dead(self, writer: Incarnation) -> bool:
        """Whether `writer` was seen here and its lock is gone."""
        return self._witness.is_dead(writer)

    def close(self) -> None:
        """Delete the file and unmap. Idempotent."""
        if self._fd is not None:
            self._delete()
            self._map.close()
            self._witness.close()

    def _delete(self) -> None:
        assert self._fd is not None
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None


class ShmWriter:
    """The writer's side: another process's pool, mapped."""

    def __init__(self, endpoint: LinkEndpoint, directory: Path) -> None:
        self._path = Path(endpoint.address)
        self._map: PoolMap | None = map_pool(endpoint, directory)

    @property
    def is_ready(self) -> bool:
        """Whether somebody is there: it is mapped."""
        return not self.reader_is_gone()

    def connect(self) -> None:
        """Nothing to do. Raises `LinkBroken` if nobody would read what is written."""
        if self.reader_is_gone():
            raise LinkBroken(f"{self._path.name} is nobody's any more")

    def buffer(self, ref: SlotRef) -> memoryview:
        """The slot itself. Raises `Refused` if it is closed for this generation."""
        pool = self._mapped(ref)
        pool.marks[ref.slot] = ref.generation  # Before the gate is looked at: see `pool_file`.
        try:
            _check_gate(pool, ref)
        except Refused:
            self.stop(ref)
            raise
        return pool.slot(ref.slot, pool.shape.slot_bytes)

    def send(self, blocks: Sequence[tuple[SlotRef, memoryview]], seal: bytes = b"") -> None:
        """The bytes are there already; raises `Refused` if a slot was closed meanwhile."""
        if not blocks:
            return
        pool = self._mapped(blocks[0][0])
        gates, slots = pool.gates, pool.shape.slots
        for ref, _ in blocks:
            if not 0 <= ref.slot < slots or gates[ref.slot] != ref.generation:
                self._mapped(ref)
                _check_gate(pool, ref)

    def confirm(self) -> None:
        """Nothing to wait for."""

    def is_sending(self, ref: SlotRef) -> bool:
        """Never: nothing is sent."""
        return False

    def stop(self, ref: SlotRef) -> None:
        """Say that nothing more is written into the slot under this generation."""
        if self._map is not None and self._map.marks[ref.slot] == ref.generation:
            self._map.marks[ref.slot] = CLOSED

    def reader_is_gone(self) -> bool:
        """Whether the pool's file was deleted, or nobody holds its lock: its owner is dead."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # Out of descriptors, say: it proves nothing.
        try:
            return is_abandoned(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap. Idempotent."""
        pool, self._map = self._map, None
        if pool is not None:
            pool.close()

    def _mapped(self, ref: SlotRef) -> PoolMap:
        pool = self._map
        if pool is None:
            raise Refused(RefusalReason.UNKNOWN_TICKET, "the link is closed")
        if not 0 <= ref.slot < pool.shape.slots:
            raise Refused(RefusalReason.UNKNOWN_TICKET, f"the pool has no slot {ref.slot}")
        return pool


def _check_gate(pool: PoolMap, ref: SlotRef) -> None:
    if pool.gates[ref.slot] != ref.generation:
        raise Refused(
            RefusalReason.UNKNOWN_TICKET,
            f"slot {ref.slot} is closed for generation {ref.generation}",
        )

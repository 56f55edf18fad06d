"""Files: a description in bucket `files`, the content in objects of at most 1 MiB.

Content is written first and described last, so a file that is there is whole. What an upload that
broke off leaves over is dropped at once, or goes with its bucket's age.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from hashlib import sha256

from diptych_bus.port import Bus, Kept
from diptych_contracts.batches import FILE_PART_BYTES, StoredFile, part_name
from diptych_contracts.errors import BusAway, Conflict, Permanent, Transient
from diptych_contracts.streams import FILE_PARTS, FILES
from diptych_gateway.files.board import Board

_PART_S = 10.0
_DROP_S = 5.0
_PAUSE_S = 0.25


class FileGone(Permanent):
    """A file's content is not there any more."""


class ContentWriter:
    """Writes content that comes piece by piece; holds no more than a part of it.

    Args:
        bus: Where to.
        content: The name of it: the same content under the same name again changes nothing.
    """

    def __init__(self, bus: Bus, content: str) -> None:
        self.content = content
        self.n_bytes = 0
        self.n_parts = 0
        self._bus = bus
        self._digest = sha256()
        self._buffer = bytearray()

    @property
    def digest(self) -> str:
        """SHA-256 of all that was written."""
        return self._digest.hexdigest()

    async def write(self, data: bytes) -> None:
        """Add `data`. Raises `Transient`."""
        self._take(data)
        await self._put_full(patient=False)

    async def finish(self) -> None:
        """Write what is left. Raises `Transient`."""
        if self._buffer:
            await self._put(bytes(self._buffer))
            self._buffer.clear()

    async def patiently_write(self, data: bytes) -> None:
        """Add `data`, once the bus is there."""
        self._take(data)
        await self._put_full(patient=True)

    async def patiently_finish(self) -> None:
        """Write what is left, once the bus is there."""
        while True:
            try:
                await self.finish()
            except Transient:
                await asyncio.sleep(_PAUSE_S)
                continue
            return

    async def drop(self) -> None:
        """Remove it again, as far as the bus is there."""
        await drop_content(self._bus, self.content, self.n_parts + 1)

    def _take(self, data: bytes) -> None:
        self.n_bytes += len(data)
        self._buffer += data

    async def _put_full(self, *, patient: bool) -> None:
        while len(self._buffer) >= FILE_PART_BYTES:
            try:
                await self._put(bytes(self._buffer[:FILE_PART_BYTES]))
            except Transient:
                if not patient:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            del self._buffer[:FILE_PART_BYTES]

    async def _put(self, part: bytes) -> None:
        name = part_name(self.content, self.n_parts)
        try:
            async with asyncio.timeout(_PART_S):
                await self._bus.put_object(FILE_PARTS, name, part)
        except TimeoutError as err:
            raise BusAway(f"part {name} was not stored within {_PART_S:g} s") from err
        self._digest.update(part)
        self.n_parts += 1


class FileStore:
    """The files of all tenants."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.board = Board(bus, FILES, StoredFile)

    def writer(self, content: str) -> ContentWriter:
        """For new content."""
        return ContentWriter(self._bus, content)

    async def create(self, file: StoredFile) -> StoredFile:
        """Describe a file whose content is written; gives the one of that id that was first.

        Raises:
            Transient: the bus is away.
        """
        bucket = self.board.bucket
        ttl_s = (file.expires_unix_ms - file.created_unix_ms) / 1000
        while True:
            try:
                revision = await bucket.create(file.file_id, file, ttl_s=ttl_s)
            except Conflict:
                kept = await bucket.get(file.file_id)
                if kept is None:
                    continue
                return kept.value
            self.board.note(Kept(file.file_id, file, revision))
            return file

    async def get(self, file_id: str, *, tenant: str) -> StoredFile | None:
        """A file of `tenant`. Raises `Transient`."""
        kept = await self.board.bucket.get(file_id)
        return kept.value if kept is not None and kept.value.tenant == tenant else None

    def of(self, tenant: str) -> list[StoredFile]:
        """All files of `tenant`, the newest first."""
        found = [file for file in self.board if file.tenant == tenant]
        return sorted(found, key=lambda f: (f.created_unix_ms, f.file_id), reverse=True)

    async def delete(self, file: StoredFile) -> None:
        """Forget a file. Raises `Transient`."""
        await self.board.bucket.delete(file.file_id)
        self.board.forget(file.file_id)
        await drop_content(self._bus, file.content, file.n_parts)

    async def content(self, file: StoredFile) -> AsyncIterator[bytes]:
        """A file's content, part by part.

        Raises:
            FileGone: a part is not there.
            Transient: the bus is away.
        """
        for number in range(file.n_parts):
            part = await self.part(file.part(number))
            if part is None:
                raise FileGone(f"the content of file '{file.file_id}' is no longer there")
            yield part

    async def patient_content(self, file: StoredFile) -> AsyncIterator[bytes]:
        """The same, waiting for the bus. Raises `FileGone`."""
        for number in range(file.n_parts):
            part: bytes | None = None
            while part is None:
                try:
                    part = await self.part(file.part(number))
                except Transient:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if part is None:
                    raise FileGone(f"the content of file '{file.file_id}' is no longer there")
            yield part

    async def part(self, name: str) -> bytes | None:
        """One object. Raises `Transient`."""
        try:
            async with asyncio.timeout(_PART_S):
                return await self._bus.get_object(FILE_PARTS, name)
        except TimeoutError as err:
            raise BusAway(f"part {name} was not read within {_PART_S:g} s") from err

    async def put_part(self, name: str, data: bytes) -> None:
        """Store one object that belongs to no file. Raises `Transient`."""
        await self._bus.put_object(FILE_PARTS, name, data)

    async def drop_part(self, name: str) -> None:
        """Remove one object. Raises `Transient`."""
        await self._bus.delete_object(FILE_PARTS, name)


async def drop_content(bus: Bus, content: str, n_parts: int) -> None:
    """Remove content that nothing describes, as far as the bus is there."""
    with suppress(Transient, TimeoutError):
        async with asyncio.timeout(_DROP_S):
            for number in range(n_parts):
                await bus.delete_object(FILE_PARTS, part_name(content, number))

"""Keys and identities change under a running stack: nothing is lost, and who is out is out."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.port import JournalItem
from diptych_contracts.errors import BusAway
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import TokenEntry, TokenFrame
from diptych_identity import files, identity
from diptych_identity.roles import Role
from diptych_testkit.guarded_nats import GuardedNats, guarded_nats

GATEWAY = Incarnation("gateway-1")
WORKER = "decode-worker-1"


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[GuardedNats]:
    with guarded_nats(tmp_path) as nats:
        yield nats


def frame(index: int) -> TokenFrame:
    entry = TokenEntry(request_id=RequestId("r"), attempt=1, index=index, token_ids=(index,))
    return TokenFrame(worker=Incarnation(WORKER), entries=(entry,))


class Stream:
    """A worker that appends all the time, and a gateway that reads."""

    def __init__(self, worker: JetStreamBus, gateway: JetStreamBus) -> None:
        self._worker = worker
        self._gateway = gateway
        self.sent = 0
        self.seen: list[int] = []

    def hear(self, item: JournalItem) -> None:
        assert isinstance(item.entry, TokenFrame)
        self.seen += [entry.index for entry in item.entry.entries]

    async def run(self) -> None:
        await self._gateway.follow(GATEWAY, self.hear)
        while True:
            self._worker.append(GATEWAY, frame(self.sent))
            self.sent += 1
            await asyncio.sleep(0.005)

    async def whole(self) -> None:
        """Wait until all that was sent is read; it came once and in order."""
        assert await self._worker.flush(60.0)
        await until(lambda: len(set(self.seen)) == self.sent)
        assert list(dict.fromkeys(self.seen)) == list(range(self.sent))


@asynccontextmanager
async def streaming(worker: JetStreamBus, gateway: JetStreamBus) -> AsyncIterator[Stream]:
    stream = Stream(worker, gateway)
    task = asyncio.create_task(stream.run())
    try:
        yield stream
        task.cancel()
        await asyncio.wait({task})
        await stream.whole()
    finally:
        task.cancel()
        await worker.close()
        await gateway.close()


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def more(stream: Stream, count: int = 50) -> None:
    """Go on until `count` more have been read."""
    goal = len(stream.seen) + count
    await until(lambda: len(stream.seen) >= goal)


async def test_an_identity_that_is_renewed_outlives_its_expiry(nats: GuardedNats) -> None:
    path = nats.issue(Role.DECODE_WORKER, WORKER, ttl_s=8)
    issued_s = time.monotonic()
    worker = await nats.join_from(path)
    async with streaming(worker, await nats.join(Role.GATEWAY)) as stream:
        first = identity.read(path)
        renewed = nats.authority.issuer(Role.DECODE_WORKER).renew(first, ttl_s=60)
        files.write(path, renewed.text())
        await asyncio.sleep(8.5 - (time.monotonic() - issued_s))
        await more(stream)
        assert worker.connected


async def test_signing_keys_and_the_certificate_are_rotated_under_load(nats: GuardedNats) -> None:
    path = nats.issue(Role.DECODE_WORKER, WORKER)
    worker = await nats.join_from(path)
    async with streaming(worker, await nats.join(Role.GATEWAY)) as stream:
        await more(stream)
        before = served(nats)
        for role in (Role.DECODE_WORKER, Role.GATEWAY):
            nats.authority.rotate(role)
        nats.authority.renew_server(("127.0.0.1",))
        nats.reload()
        await more(stream)
        await until(lambda: served(nats) != before)
        renewed = nats.authority.issuer(Role.DECODE_WORKER).renew(identity.read(path))
        files.write(path, renewed.text())
        nats.authority.retire(Role.DECODE_WORKER)
        nats.reload()
        await more(stream)
        await nats.server.kill()
        await nats.server.start()
        await more(stream)


async def test_one_that_is_revoked_is_out_after_a_reload(nats: GuardedNats) -> None:
    path = nats.issue(Role.DECODE_WORKER, WORKER)
    worker = await nats.join_from(path)
    nats.authority.revoke_identity(identity.read(path))
    nats.reload()
    await until(lambda: not worker.connected)
    with pytest.raises(BusAway):
        await nats.join_from(path, wait_s=1.0)
    reason = await asyncio.wait_for(worker.closed, 60)
    assert "refuses this process's identity" in str(reason)
    await worker.close()


async def test_one_by_a_retired_key_is_out_after_a_reload(nats: GuardedNats) -> None:
    worker = await nats.join(Role.DECODE_WORKER)
    nats.authority.rotate(Role.DECODE_WORKER)
    nats.authority.retire(Role.DECODE_WORKER)
    nats.reload()
    await until(lambda: not worker.connected)
    await worker.close()


def served(nats: GuardedNats) -> bytes | None:
    """The certificate that the server shows."""
    context = nats.access(Role.OBSERVER).tls()
    with (
        socket.create_connection(("127.0.0.1", nats.server.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as link,
    ):
        return link.getpeercert(binary_form=True)

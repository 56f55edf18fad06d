"""A NIXL error that says neither "done" nor "gone": its source stays taken until it is over.

And what is left of agents that were closed, and of peers that died: nothing.
"""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych_contracts.errors import LinkBroken
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.transfers import Reserve, SlotRef, Ticket
from diptych_contracts.wire import decode, encode
from diptych_kvlink.links import KINDS, LinkSettings, open_writing
from diptych_kvlink.nixl_library import LOOPBACK, why_absent
from diptych_kvlink.nixl_target import NixlTarget
from diptych_kvlink.nixl_writer import NixlWriter, NixlWriting
from diptych_kvlink.pool_file import PoolShape, private_slots
from diptych_testkit.builders import a_generation
from diptych_testkit.kv_pair import Peer, until
from diptych_testkit.kv_peer import BLOCK_BYTES, FINGERPRINT, LAYOUT, WRITER

pytestmark = [
    pytest.mark.skipif(bool(why_absent()), reason="NIXL is not installed"),
    pytest.mark.timeout(240),
]
BLOCKS = 3


class nixlBackendError(Exception):
    """What UCX says when it cannot say more."""


class Doubtful:
    """A NIXL agent that answers one question about a transfer with an error."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def check_xfer_state(self, handle: Any) -> Any:
        if not self.asked:
            self.asked = True
            raise nixlBackendError("NIXL_ERR_BACKEND")
        return self._agent.check_xfer_state(handle)


@pytest.fixture(params=["tcp", "tcp,cma"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def reader(tmp_path: Path, transports: str) -> Iterator[Peer]:
    told = {"kinds": ["shm", "nixl"], "directory": str(tmp_path), "slots": 8, "lease_s": 600.0}
    peer = Peer("reader", told, environment={"UCX_TLS": transports})
    yield peer
    peer.kill_quietly()


@pytest.fixture
def shared(tmp_path: Path, transports: str) -> Iterator[NixlWriting]:
    made = open_writing(WRITER, LinkSettings(kinds=KINDS, directory=tmp_path))
    assert made is not None
    yield made
    made.close()


def opened(reader: Peer, shared: NixlWriting) -> tuple[NixlWriter, Ticket]:
    """The link, as it is once a ticket has been given and a gate was seen open."""
    reserve = Reserve(
        transfer_id=transfer_id(RequestId("r1"), 1),
        generation=a_generation("r1"),
        prefill_worker=WRITER,
        link="nixl",
        layout=LAYOUT,
        fingerprint=FINGERPRINT,
        agent=shared.agent,
    )
    given = reader.ask("reserve", reserve=encode(reserve).hex(), tokens=BLOCKS * 4)
    ticket = decode(bytes.fromhex(given), Ticket)
    link = NixlWriter(ticket.endpoint, shared, stall_s=60)
    link.connect()
    return link, ticket


def in_doubt(
    reader: Peer, link: NixlWriter, ticket: Ticket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a frozen reader, of which NIXL then says that something is wrong with it."""
    blocks = []
    for ref in ticket.slots:
        buffer = link.buffer(ref)
        buffer[:] = b"A" * BLOCK_BYTES
        blocks.append((ref, buffer))
    monkeypatch.setattr(NixlWriter, "_look_at_gates", lambda *_: iter(()))
    plane = link._shared.plane
    doubtful = plane.call(Doubtful).result(60)
    plane.call(lambda _: setattr(plane, "_agent", doubtful)).result(60)
    reader.signal(signal.SIGSTOP)
    plane.call(lambda _: setattr(doubtful, "asked", False)).result(60)
    link.send(blocks)
    with pytest.raises(LinkBroken, match="nixlBackendError"):
        link.confirm()
    for ref, buffer in blocks:
        buffer.release()
        link.stop(ref)


def free_sources(shared: NixlWriting) -> int:
    return len(shared.sources._free[BLOCK_BYTES])


@pytest.mark.parametrize("transports", ["tcp"], indirect=True)
def test_sources_come_back_when_a_later_read_proves_that_the_write_is_over(
    reader: Peer, shared: NixlWriting, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, ticket = opened(reader, shared)
    before = free_sources(shared)
    in_doubt(reader, link, ticket, monkeypatch)

    assert shared.plane.unfinished >= 1
    assert free_sources(shared) == before - BLOCKS
    refs = [SlotRef(slot=ref.slot, generation=9) for ref in ticket.slots]
    for ref in refs:  # The next request's, while the reader still sleeps.
        link.buffer(ref)[:] = b"B" * BLOCK_BYTES
    link.close()  # It does not forget a peer that something may be on its way to.
    reader.signal(signal.SIGCONT)

    until(lambda: shared.plane.unfinished == 0)
    for ref in refs:
        link.stop(ref)
    assert free_sources(shared) == before
    assert [reader.ask("memory")[ref.slot] for ref in ticket.slots] == ["A"] * BLOCKS
    assert not shared.on_their_way


def test_sources_come_back_when_the_peer_is_dead(
    reader: Peer, shared: NixlWriting, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    link, ticket = opened(reader, shared)
    before = free_sources(shared)
    in_doubt_or_done = transports != "tcp"  # By CMA a frozen process is written to.
    if in_doubt_or_done:
        monkeypatch.setattr(Doubtful, "check_xfer_state", _never_done)
        monkeypatch.setattr(Doubtful, "transfer", _never_done, raising=False)
    in_doubt(reader, link, ticket, monkeypatch)
    monkeypatch.undo()

    reader.kill_quietly()

    until(lambda: shared.plane.unfinished == 0)
    assert free_sources(shared) == before


def _never_done(_: Any, *__: Any) -> Any:
    raise nixlBackendError("NIXL_ERR_BACKEND")


def test_a_peer_that_died_leaves_no_descriptor(reader: Peer, shared: NixlWriting) -> None:
    before = _descriptors()
    link, _ = opened(reader, shared)
    assert not link.reader_is_gone()
    reader.kill_quietly()
    until(link.reader_is_gone)
    link.close()
    until(lambda: _descriptors() <= before)


@pytest.mark.parametrize("transports", ["tcp,cma"], indirect=True)
@pytest.mark.parametrize("first", ["reader", "writer"])
def test_twenty_agents_that_came_and_went_leave_no_descriptor_and_no_thread(
    tmp_path: Path, first: str, transports: str
) -> None:
    shape, found, before = PoolShape(4, BLOCK_BYTES), [], _planes()
    for number in range(20):
        target = NixlTarget(
            f"decode-worker-{number}",
            private_slots(shape),
            shape=shape,
            network=LOOPBACK,
            directory=tmp_path,
        )
        writing = NixlWriting(Incarnation(f"prefill-worker-{number}"), network=LOOPBACK)
        ref = SlotRef(slot=0, generation=1)
        target.admit(0, 1, Incarnation(f"prefill-worker-{number}"), transfer_id(RequestId("r"), 1))
        link = NixlWriter(target.endpoint, writing, stall_s=60)
        link.connect()
        link.send([(ref, link.buffer(ref))])
        link.confirm()
        ends: list[Callable[[], None]] = [target.close, writing.close]
        for end in ends if first == "reader" else reversed(ends):
            end()
        found.append(_descriptors())
    until(lambda: _descriptors() <= found[1])
    until(lambda: _planes() <= before)


@pytest.mark.parametrize("transports", ["tcp"], indirect=True)
def test_an_agent_that_is_closed_while_it_writes_leaves_no_descriptor(
    reader: Peer, tmp_path: Path
) -> None:
    before = _descriptors()
    shared = open_writing(WRITER, LinkSettings(kinds=KINDS, directory=tmp_path))
    assert shared is not None
    link, ticket = opened(reader, shared)
    reader.signal(signal.SIGSTOP)
    link.send([(ticket.slots[0], link.buffer(ticket.slots[0]))])
    shared.plane.call(lambda _: None).result(60)  # By now it is posted.
    assert shared.plane.unfinished >= 1
    shared.close()
    assert shared.plane.unfinished == 0
    until(lambda: _descriptors() <= before)


def _planes() -> set[threading.Thread]:
    """The agents' threads; other tests may have left some of theirs."""
    return {thread for thread in threading.enumerate() if thread.name == "kv-nixl"}


def _descriptors() -> int:
    gc.collect()  # Frames of errors that were caught hold what was in them.
    return len(os.listdir("/proc/self/fd"))

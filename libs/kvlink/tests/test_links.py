import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import Incompatible, Permanent
from diptych_contracts.ids import Incarnation
from diptych_kvlink.links import LinkSettings, open_link, open_targets
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.sealing import TicketOffice
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_receiving import Guard
from diptych_kvlink.writer_links import WriterLinks

SHAPE = PoolShape(slots=2, slot_bytes=6000)
NAME = Incarnation("prefill-worker-a1")
GUARD = Guard(TicketOffice(lambda: 0.0), Tally())


def test_an_unknown_kind_of_endpoint_is_incompatible(reader: Any, settings: LinkSettings) -> None:
    endpoint = msgspec.structs.replace(reader.endpoint, kind="rdma")

    with pytest.raises(
        Incompatible, match="unknown kind of KV link 'rdma': expected shm, nixl, tcp"
    ):
        open_link(endpoint, writer=NAME, settings=settings)


@pytest.mark.parametrize("kinds", [(), ("shm", "rdma")])
def test_unknown_kinds_stop_the_start(kinds: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(Permanent, match="expected shm, nixl, tcp"):
        open_targets(
            LinkSettings(kinds=kinds, directory=tmp_path), name="x", shape=SHAPE, guard=GUARD
        )


def test_links_are_offered_in_the_order_they_are_named(tmp_path: Path) -> None:
    settings = LinkSettings(kinds=("tcp", "shm"), directory=tmp_path)
    targets = open_targets(settings, name="x", shape=SHAPE, guard=GUARD)
    assert [target.endpoint.kind for target in targets] == ["tcp", "shm"]
    for target in targets:
        target.close()


def test_tcp_alone_needs_no_shared_memory(tmp_path: Path) -> None:
    settings = LinkSettings(kinds=("tcp",), directory=tmp_path / "absent")
    (target,) = open_targets(settings, name="x", shape=SHAPE, guard=GUARD)
    WriterLinks(NAME, settings=settings).close()
    assert bytes(target.view(1, 6000)) == bytes(6000)
    target.close()


def test_a_port_in_use_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Permanent, match=f"cannot listen on 127.0.0.1:{port} for KV: Address"):
            open_targets(
                LinkSettings(directory=tmp_path, port=port), name="x", shape=SHAPE, guard=GUARD
            )
    assert list(tmp_path.iterdir()) == []


async def test_a_writers_links_carry_a_transfer(
    reader: Any, settings: LinkSettings, tmp_path: Path
) -> None:
    links = WriterLinks(NAME, settings=settings, clock=lambda: 0.0)
    ticket = reader.reserve(tokens=4, certificate=links.certificate)
    transfer = await links.transfer(ticket, sent_s=0.0, salt=reader.salt)
    transfer.buffer(0)[:] = b"k" * 6000
    transfer.written(0, 6000)

    job = reader.job(ticket, await transfer.digests(5.0))

    (block,) = reader.incoming.claim(job, tokens=4, now_s=1.0)
    assert bytes(block.data) == b"k" * 6000
    links.close()
    links.close()
    assert os.listdir(tmp_path) == ["diptych-kv-decode-worker-0"]


@pytest.mark.parametrize("kind", ["shm"])
def test_a_vanished_readers_memory_is_let_go(make_reader: Any, settings: LinkSettings) -> None:
    """Decoders once kept a dead peer's 67 GiB mapped (vllm-project/vllm #58063)."""
    first, second = make_reader(), make_reader()
    links = WriterLinks(NAME, settings=settings)
    link = links.open(first.incoming.endpoints[0])
    assert links.open(first.incoming.endpoints[0]) is link

    first.incoming.close()
    links.open(second.incoming.endpoints[0])

    links.leave(second.incoming.endpoints[0])
    links.close()
    maps = Path("/proc/self/maps").read_text()
    assert str(first.incoming.endpoints[0].address) not in maps

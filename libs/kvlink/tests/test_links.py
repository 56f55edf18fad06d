import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import Incompatible
from diptych_contracts.ids import Incarnation
from diptych_kvlink.links import KINDS, choose, open_link, open_target
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.writer_links import WriterLinks

NAME = Incarnation("prefill-worker-a1")


def test_an_unknown_kind_is_incompatible(reader: Any, tmp_path: Path) -> None:
    endpoint = msgspec.structs.replace(reader.incoming.endpoints[0], kind="rdma")

    with pytest.raises(Incompatible, match="unknown kind of KV link 'rdma': expected shm"):
        open_link(endpoint, directory=tmp_path)
    with pytest.raises(Incompatible, match="rdma"):
        open_target("rdma", name="x", shape=PoolShape(1, 1), directory=tmp_path)


def test_the_first_common_kind_is_chosen(reader: Any) -> None:
    shm = reader.incoming.endpoints[0]
    rdma = msgspec.structs.replace(shm, kind="rdma")

    assert KINDS == ("shm",)
    assert choose([rdma, shm]) == shm
    assert choose([rdma, shm], wanted="shm") == shm
    with pytest.raises(Incompatible, match="expected tcp, offered rdma, shm"):
        choose([rdma, shm], wanted="tcp")
    with pytest.raises(Incompatible, match="offered none"):
        choose([])


async def test_a_writers_links_carry_a_transfer(reader: Any, tmp_path: Path) -> None:
    links = WriterLinks(NAME, directory=tmp_path, clock=lambda: 0.0)
    ticket = reader.reserve(tokens=4)
    transfer = links.transfer(ticket, sent_s=0.0)
    transfer.buffer(0)[:] = b"k" * 6000
    transfer.written(0, 6000)

    job = reader.job(ticket, await transfer.digests(5.0))

    (block,) = reader.incoming.claim(job, tokens=4, now_s=1.0)
    assert bytes(block.data) == b"k" * 6000
    links.close()
    links.close()
    assert os.listdir(tmp_path) == ["diptych-kv-decode-worker-0"]


def test_a_vanished_readers_memory_is_let_go(make_reader: Any, tmp_path: Path) -> None:
    """Decoders once kept a dead peer's 67 GiB mapped (vllm-project/vllm #58063)."""
    first, second = make_reader(), make_reader()
    links = WriterLinks(NAME, directory=tmp_path)
    link = links.open(first.incoming.endpoints[0])
    assert links.open(first.incoming.endpoints[0]) is link

    first.incoming.close()
    links.open(second.incoming.endpoints[0])

    maps = Path("/proc/self/maps").read_text()
    assert str(first.incoming.endpoints[0].address) not in maps
    assert str(second.incoming.endpoints[0].address) in maps
    links.close()

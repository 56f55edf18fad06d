"""Blocks that are encoded or sealed, from an engine's buffer to a claim, over each link."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_contracts.codecs import INT8, LOSSLESS, RAW
from diptych_contracts.errors import Incompatible, Refused, Unverified
from diptych_contracts.transfers import Ticket
from diptych_kvlink.agreement import check_ticket
from diptych_kvlink.links import SHM, TCP, LinkSettings
from diptych_kvlink.outgoing import OutgoingTransfer
from diptych_kvlink.packing import Packing
from diptych_kvlink.writer_links import WriterLinks

Tee = Callable[[int, memoryview], None]
CONTENTS = [b"abc" * 2000, b"de" * 3000, bytes(3001)]


@pytest.fixture
def settings(settings: LinkSettings) -> LinkSettings:
    return replace(settings, codecs=(RAW, LOSSLESS, INT8), seal=True)


async def written(
    reader: Any, ticket: Ticket, thread: ThreadPoolExecutor, tee: Tee | None = None
) -> Any:
    link = reader.link()
    link.connect()
    transfer = OutgoingTransfer(
        ticket, link, thread=thread, sent_s=0.0, salt=reader.salt, clock=lambda: 0.0
    )
    transfer.tee = tee
    for index, content in enumerate(CONTENTS):
        transfer.buffer(index)[: len(content)] = content
        transfer.written(index, len(content))
    digests = await transfer.digests(5.0)
    assert transfer.close()
    return transfer, digests


def asked(reader: Any, codec: str = LOSSLESS) -> Ticket:
    ticket: Ticket = reader.reserve(codec=codec, seals=True)
    return ticket


async def test_encoded_and_sealed_blocks_come_back(
    reader: Any, kind: str, link_thread: ThreadPoolExecutor
) -> None:
    ticket = asked(reader)
    assert ticket.codec == LOSSLESS
    assert bool(ticket.sealing_key) == (kind != TCP)  # the other one speaks TLS

    transfer, digests = await written(reader, ticket, link_thread)
    assert transfer.raw_bytes == 15001 > 10 * transfer.bytes_written
    assert (transfer.codec, transfer.sealed) == (LOSSLESS, kind != TCP)

    blocks = reader.incoming.claim(reader.job(ticket, digests), tokens=10, now_s=1.0)
    assert [bytes(block.unpacked()) for block in blocks] == CONTENTS
    (seen,) = reader.incoming.transfers(1.0)
    assert (seen.codec, seen.sealed) == (LOSSLESS, kind != TCP)
    assert seen.n_bytes == transfer.bytes_written
    assert repr(ticket.sealing_key) not in repr(ticket) or not ticket.sealing_key


async def test_a_tee_sees_each_block_as_the_engine_wrote_it_and_on_no_engines_thread(
    reader: Any, link_thread: ThreadPoolExecutor
) -> None:
    seen: dict[int, bytes] = {}
    threads: set[int] = set()

    def tee(index: int, data: memoryview) -> None:
        assert index not in seen
        seen[index] = bytes(data)
        threads.add(threading.get_ident())

    ticket = asked(reader)
    _, digests = await written(reader, ticket, link_thread, tee)
    assert seen == dict(enumerate(CONTENTS))
    assert threads == {link_thread.submit(threading.get_ident).result()}
    blocks = reader.incoming.claim(reader.job(ticket, digests), tokens=10, now_s=1.0)
    assert [bytes(block.unpacked()) for block in blocks] == CONTENTS


async def test_what_no_codec_understands_travels_as_it_is(
    reader: Any, link_thread: ThreadPoolExecutor
) -> None:
    ticket = asked(reader, INT8)
    _, digests = await written(reader, ticket, link_thread)
    assert [(d.n_bytes, d.raw_bytes) for d in digests] == [(6000, 0), (6000, 0), (3001, 0)]
    blocks = reader.incoming.claim(reader.job(ticket, digests), tokens=10, now_s=1.0)
    assert [bytes(block.unpacked()) for block in blocks] == CONTENTS


@pytest.mark.parametrize("codec", ["delta", "gzip", "raw"])
def test_a_codec_that_is_not_allowed_here_becomes_raw(reader: Any, codec: str) -> None:
    assert asked(reader, codec).codec == RAW


def test_the_same_reservation_keeps_its_key_and_another_transfer_has_another(reader: Any) -> None:
    ticket = asked(reader)
    assert asked(reader).sealing_key == ticket.sealing_key
    other = reader.reserve("r2", seals=True)
    assert (other.sealing_key != ticket.sealing_key) == bool(ticket.sealing_key)


def test_a_writer_that_cannot_seal_is_refused_where_it_must(reader: Any, kind: str) -> None:
    if kind != TCP:
        with pytest.raises(Refused, match="seals no blocks"):
            reader.reserve()
    else:
        assert reader.reserve().sealing_key == b""
    assert reader.incoming.slots_used in (0, 3)


@pytest.mark.parametrize("kind", [SHM])
async def test_a_block_sealed_with_another_key_is_not_verified(
    reader: Any, link_thread: ThreadPoolExecutor
) -> None:
    ticket = asked(reader)
    forged = msgspec.structs.replace(ticket, sealing_key=bytes(32))
    _, digests = await written(reader, forged, link_thread)
    blocks = reader.incoming.claim(reader.job(ticket, digests), tokens=10, now_s=1.0)
    for block in blocks:
        with pytest.raises(Unverified) as seen:
            block.unpacked()
        assert seen.value.reason == "kv_seal"


@pytest.mark.parametrize("kind", [SHM])
async def test_a_late_write_cannot_change_what_was_opened(
    reader: Any, link_thread: ThreadPoolExecutor
) -> None:
    """Shared memory stops no writer; what was unpacked lies elsewhere."""
    ticket = asked(reader)
    late = reader.link().buffer(ticket.slots[0])
    _, digests = await written(reader, ticket, link_thread)
    first, *_ = reader.incoming.claim(reader.job(ticket, digests), tokens=10, now_s=1.0)
    opened = first.unpacked()
    late[:] = bytes(6000)
    assert bytes(opened) == CONTENTS[0]
    with pytest.raises(Unverified):
        first.unpacked()
    late.release()


async def test_an_encoded_block_without_leave_is_refused(
    make_reader: Any, link_thread: ThreadPoolExecutor
) -> None:
    reader = make_reader()
    ticket = asked(reader, RAW)
    _, digests = await written(reader, ticket, link_thread)
    lying = (msgspec.structs.replace(digests[0], raw_bytes=6000), *digests[1:])
    with pytest.raises(Unverified, match="by codec raw"):
        reader.incoming.claim(reader.job(ticket, lying), tokens=10, now_s=1.0)


@pytest.mark.parametrize("raw_bytes", [5999, 6001, 2**40, -1])
async def test_a_block_that_would_not_fit_when_decoded_is_refused(
    reader: Any, link_thread: ThreadPoolExecutor, raw_bytes: int
) -> None:
    ticket = asked(reader)
    _, digests = await written(reader, ticket, link_thread)
    lying = (msgspec.structs.replace(digests[0], raw_bytes=raw_bytes), *digests[1:])
    with pytest.raises(Unverified, match="expected 6000 to 6000"):
        reader.incoming.claim(reader.job(ticket, lying), tokens=10, now_s=1.0)


@pytest.mark.parametrize("changes", [{"codec": INT8}, {"sealing_key": b"short"}, {"codec": "gzip"}])
def test_a_ticket_of_another_codec_or_key_is_no_answer(
    reader: Any, changes: dict[str, Any]
) -> None:
    request = reader.request(codec=LOSSLESS, seals=True)
    ticket = reader.incoming.reserve(request, tokens=10, now_s=0.0)
    check_ticket(ticket, request, tokens=10)
    with pytest.raises(Incompatible, match="codec"):
        check_ticket(msgspec.structs.replace(ticket, **changes), request, tokens=10)


@pytest.mark.parametrize("kind", [SHM])
async def test_a_writer_that_must_seal_writes_nothing_without_a_key(
    reader: Any, tmp_path: Path
) -> None:
    links = WriterLinks(reader.writer, settings=reader.settings)
    try:
        bare = msgspec.structs.replace(asked(reader), sealing_key=b"")
        with pytest.raises(Incompatible, match="sealing is required"):
            await links.transfer(bare, sent_s=0.0, salt=1)
    finally:
        links.close()


@pytest.mark.parametrize("kind", [SHM])
async def test_a_slot_never_holds_in_the_clear_what_is_to_be_sealed(
    reader: Any, link_thread: ThreadPoolExecutor
) -> None:
    ticket = asked(reader, RAW)
    link = reader.link()
    transfer = OutgoingTransfer(
        ticket, link, thread=link_thread, sent_s=0.0, salt=reader.salt, clock=lambda: 0.0
    )
    for index, content in enumerate(CONTENTS):
        transfer.buffer(index)[: len(content)] = content
        assert content[:64] not in reader.memory(ticket.slots[index])[: len(content)] or not any(
            content
        )
        transfer.written(index, len(content))
    await transfer.digests(5.0)
    assert CONTENTS[0][:12] not in reader.memory(ticket.slots[0])
    assert transfer.close()


@pytest.mark.parametrize("codec", [LOSSLESS, RAW])
async def test_a_transfer_is_not_closed_while_its_blocks_are_packed(
    reader: Any,
    link_thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    kind: str,
) -> None:
    """`close` is the writer's word that nothing more is written; a slot is encoded in place."""
    began, go_on, pack = threading.Event(), threading.Event(), Packing.pack

    def slow(self: Packing, index: int, block: memoryview) -> Any:
        began.set()
        go_on.wait()
        return pack(self, index, block)

    monkeypatch.setattr(Packing, "pack", slow)
    ticket = asked(reader, codec)
    link = reader.link()
    link.connect()
    transfer = OutgoingTransfer(
        ticket, link, thread=link_thread, sent_s=0.0, salt=reader.salt, clock=lambda: 0.0
    )
    transfer.buffer(0)[:6000] = CONTENTS[0]
    transfer.written(0, 6000)
    await asyncio.to_thread(began.wait)
    plain = codec == RAW and kind == TCP
    closed = transfer.close()
    go_on.set()
    assert closed is plain
    await asyncio.to_thread(lambda: link_thread.submit(int).result())
    assert transfer.close()

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cffi
import msgspec
import pytest
import xxhash

from diptych_contracts.errors import Expired, Incompatible, Refused, Unverified
from diptych_contracts.transfers import SlotRef, Ticket
from diptych_kvlink.agreement import check_ticket
from diptych_kvlink.outgoing import OutgoingTransfer


class Clock:
    """Monotonic time that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_transfer(
    reader: Any, clock: Clock, link_thread: ThreadPoolExecutor
) -> Callable[[Ticket], OutgoingTransfer]:
    def make(ticket: Ticket) -> OutgoingTransfer:
        link = reader.link()
        link.connect()
        return OutgoingTransfer(
            ticket,
            link,
            thread=link_thread,
            sent_s=clock.now_s,
            salt=reader.salt,
            clock=clock,
        )

    return make


def fill(transfer: OutgoingTransfer, index: int, data: bytes) -> None:
    transfer.buffer(index)[: len(data)] = data
    transfer.written(index, len(data))


async def test_what_is_written_is_what_can_be_claimed(reader: Any, open_transfer: Any) -> None:
    ticket = reader.reserve(tokens=10)
    transfer = open_transfer(ticket)
    contents = [b"a" * 6000, b"b" * 6000, b"c" * 3001]
    for index in (1, 0, 2):
        fill(transfer, index, contents[index])

    digests = await transfer.digests(5.0)
    transfer.close()

    assert [digest.checksum for digest in digests] == [
        xxhash.xxh3_64_intdigest(d, reader.salt) for d in contents
    ]
    assert transfer.bytes_written == 15001
    blocks = reader.incoming.claim(reader.job(ticket, digests), tokens=10, now_s=1.0)
    assert [bytes(block.data) for block in blocks] == contents


async def test_checksums_are_computed_on_the_links_thread(
    reader: Any, open_transfer: Any, link_thread: ThreadPoolExecutor
) -> None:
    go = threading.Event()
    link_thread.submit(go.wait)
    transfer = open_transfer(reader.reserve(tokens=4))

    fill(transfer, 0, b"a" * 6000)

    assert transfer.bytes_written == 0
    go.set()
    assert len(await transfer.digests(5.0)) == 1


async def test_missing_blocks_are_waited_for_and_then_an_error(
    reader: Any, open_transfer: Any
) -> None:
    transfer = open_transfer(reader.reserve(tokens=8))
    fill(transfer, 0, b"a" * 6000)

    with pytest.raises(Expired, match="1 of 2 blocks"):
        await transfer.digests(0.05)

    waiting = asyncio.create_task(transfer.digests(5.0))
    fill(transfer, 1, b"a" * 6000)
    assert len(await waiting) == 2


async def test_after_the_lease_nothing_reaches_the_slots(
    reader: Any, open_transfer: Any, clock: Clock
) -> None:
    ticket = reader.reserve(tokens=8)
    transfer = open_transfer(ticket)
    fill(transfer, 0, b"a" * 6000)
    clock.now_s += 10.0

    fill(transfer, 1, b"z" * 6000)

    assert reader.memory(ticket.slots[1]) == bytes(6000)
    with pytest.raises(Expired, match="deadline of state writing passed"):
        await transfer.digests(5.0)


async def test_a_block_finished_after_the_lease_does_not_count(
    reader: Any, open_transfer: Any, clock: Clock
) -> None:
    transfer = open_transfer(reader.reserve(tokens=4))
    transfer.buffer(0)
    clock.now_s += 10.0

    transfer.written(0, 6000)

    with pytest.raises(Expired):
        await transfer.digests(5.0)


async def test_a_renewed_lease_goes_on(reader: Any, open_transfer: Any, clock: Clock) -> None:
    transfer = open_transfer(reader.reserve(tokens=4, now_s=0.0))
    clock.now_s += 9.0
    transfer.renew(reader.reserve(tokens=4, now_s=9.0), sent_s=clock.now_s)
    clock.now_s += 9.0

    fill(transfer, 0, b"a" * 6000)

    assert len(await transfer.digests(5.0)) == 1


async def test_slots_the_reader_closed_take_nothing_and_the_engine_hears_nothing(
    reader: Any, open_transfer: Any
) -> None:
    ticket = reader.reserve(tokens=8)
    transfer = open_transfer(ticket)
    fill(transfer, 0, b"a" * 6000)
    reader.incoming.release(ticket.transfer_id)

    fill(transfer, 1, b"z" * 6000)

    with pytest.raises(Refused) as caught:
        await transfer.digests(5.0)
    assert caught.value.reason == "unknown_ticket"
    reader.incoming.writer_stopped(ticket.transfer_id)


async def test_a_slot_closed_between_write_and_send_fails(reader: Any, open_transfer: Any) -> None:
    ticket = reader.reserve(tokens=4)
    transfer = open_transfer(ticket)
    buffer = transfer.buffer(0)
    reader.incoming.sweep(10.0)

    buffer[:] = b"z" * 6000
    transfer.written(0, 6000)

    with pytest.raises(Refused, match="closed for generation"):
        await transfer.digests(5.0)
    assert reader.incoming.slots_quarantined == reader.quarantined(1)


async def test_a_closed_transfer_writes_nothing(reader: Any, open_transfer: Any) -> None:
    ticket = reader.reserve(tokens=8)
    transfer = open_transfer(ticket)
    half = transfer.buffer(0)
    assert transfer.close()
    assert transfer.close()

    with pytest.raises(ValueError, match="released"):
        half[:3] = b"end"
    transfer.written(0, 6000)
    fill(transfer, 1, b"z" * 6000)

    assert reader.memory(ticket.slots[1]) == bytes(6000)
    with pytest.raises(Refused, match="was closed"):
        await transfer.digests(5.0)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_an_export_under_way_is_waited_for_before_the_writer_gives_its_word(
    reader: Any, open_transfer: Any
) -> None:
    transfer = open_transfer(reader.reserve(tokens=8))
    exporting = cffi.FFI().from_buffer(transfer.buffer(0))
    transfer.buffer(1)
    for now_s in (10.0, 10.25):
        reader.incoming.sweep(now_s)

    assert not transfer.close()
    reader.incoming.sweep(10.5)
    assert reader.incoming.slots_quarantined == reader.quarantined(2)

    del exporting
    assert transfer.close()
    reader.incoming.sweep(10.75)
    assert reader.incoming.slots_used == 0


@pytest.mark.parametrize(("index", "n_bytes"), [(1, 6000), (-1, 6000), (0, 0), (0, 6001)])
async def test_blocks_the_ticket_is_not_for_are_an_error(
    reader: Any, open_transfer: Any, index: int, n_bytes: int
) -> None:
    transfer = open_transfer(reader.reserve(tokens=4))

    transfer.buffer(index)
    transfer.written(index, n_bytes)

    with pytest.raises(Unverified):
        await transfer.digests(5.0)


async def test_a_link_thread_that_is_gone_is_an_error_not_a_crash(
    reader: Any, open_transfer: Any, link_thread: ThreadPoolExecutor
) -> None:
    transfer = open_transfer(reader.reserve(tokens=4))
    link_thread.shutdown()

    fill(transfer, 0, b"a" * 6000)

    with pytest.raises(Refused, match="link is closed"):
        await transfer.digests(5.0)


async def test_a_link_that_breaks_unexpectedly_fails_the_transfer(
    reader: Any, link_thread: ThreadPoolExecutor, clock: Clock
) -> None:
    class Broken:
        is_ready = True

        def connect(self) -> None: ...

        def buffer(self, ref: SlotRef) -> memoryview:
            return memoryview(bytearray(6000))

        def send(self, blocks: Sequence[tuple[SlotRef, memoryview]], seal: bytes = b"") -> None:
            raise OSError("cable pulled")

        def confirm(self) -> None: ...

        def stop(self, ref: SlotRef) -> None: ...

        def reader_is_gone(self) -> bool:
            return False

        def close(self) -> None: ...

    transfer = OutgoingTransfer(
        reader.reserve(tokens=4), Broken(), thread=link_thread, sent_s=100.0, salt=0, clock=clock
    )
    fill(transfer, 0, b"a" * 6000)

    with pytest.raises(Unverified, match="cable pulled"):
        await transfer.digests(5.0)


async def test_only_blocks_that_the_reader_lacks_are_written(
    reader: Any, open_transfer: Any
) -> None:
    request = reader.request(leaves_out=True)
    ticket = reader.incoming.reserve(request, tokens=10, now_s=0.0, held_blocks=1)
    again = reader.incoming.reserve(request, tokens=10, now_s=0.0)
    assert (len(ticket.slots), ticket.held_blocks) == (2, 1)
    assert (again.slots, again.held_blocks) == (ticket.slots, 1)
    check_ticket(ticket, request, tokens=10)
    transfer = open_transfer(ticket)
    fill(transfer, 1, b"b" * 6000)
    assert transfer.overlap.computed_s is None
    fill(transfer, 2, b"c" * 3001)
    assert transfer.overlap.computed_s is not None

    digests = await transfer.digests(5.0)
    transfer.close()

    assert [digest.index for digest in digests] == [1, 2]
    blocks = reader.incoming.claim(reader.job(again, digests), tokens=10, now_s=1.0)
    assert [(b.p0, b.p1, bytes(b.data)) for b in blocks] == [
        (4, 8, b"b" * 6000),
        (8, 10, b"c" * 3001),
    ]


async def test_a_block_that_the_reader_has_is_none_of_the_tickets(
    reader: Any, open_transfer: Any
) -> None:
    request = reader.request(leaves_out=True)
    transfer = open_transfer(reader.incoming.reserve(request, tokens=10, now_s=0.0, held_blocks=1))
    fill(transfer, 0, b"a" * 6000)
    with pytest.raises(Unverified, match="block 0 of 2 from block 1 on"):
        await transfer.digests(5.0)


@pytest.mark.parametrize(("held", "leaves_out"), [(1, False), (3, True), (-1, True)])
def test_a_ticket_that_leaves_out_what_nobody_offered_is_not_worked_with(
    reader: Any, held: int, leaves_out: bool
) -> None:
    request = reader.request(leaves_out=leaves_out)
    ticket = reader.incoming.reserve(request, tokens=10, now_s=0.0, held_blocks=1)
    with pytest.raises(Incompatible, match="left out"):
        check_ticket(msgspec.structs.replace(ticket, held_blocks=held), request, tokens=10)

"""What either side tells of its transfers."""

from typing import Any

import cffi
import pytest

from diptych_contracts.control import KvAsk
from diptych_contracts.ids import Incarnation
from diptych_kvlink.links import LinkSettings
from diptych_kvlink.writer_links import WriterLinks

NAME = Incarnation("prefill-worker-a1")
READER = Incarnation("decode-worker-0")


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_reader_tells_of_each_transfer_by_how_its_id_begins(reader: Any) -> None:
    first = reader.reserve("ab1", tokens=10)
    reader.reserve("cd1", tokens=4)
    reader.incoming.claim(reader.job(first, reader.write(first)), tokens=10, now_s=1.0)
    reader.incoming.release(first.transfer_id)
    reader.incoming.note_refused(reader.request("ab2"), "no_room: full", 1.0)

    over, refused = reader.incoming.about("ab", 2.0)

    assert (over.transfer_id, over.state, over.reason) == ("ab1.1", "released", "imported")
    assert [step.state for step in over.steps] == ["reserved", "written", "verified", "released"]
    assert over.n_bytes == 15_000
    assert (refused.transfer_id, refused.state) == ("ab2.1", "refused")
    assert (refused.reason, refused.ended_ms, refused.writer) == ("no_room: full", 1000, NAME)
    (held,) = reader.incoming.about("cd", 2.0)
    assert (held.state, held.ended_ms, held.in_quarantine) == ("reserved", 0, False)
    assert (len(held.slots), held.left_ms) == (1, 8000)
    assert reader.incoming.about("ef", 2.0) == []


@pytest.mark.parametrize("kind", ["shm"])
def test_quarantine_is_told(reader: Any) -> None:
    ticket = reader.reserve(tokens=8)
    reader.link().buffer(ticket.slots[0])
    reader.incoming.sweep(11.0)

    (told,) = reader.incoming.transfers(12.0, slots=True)

    assert (told.state, told.in_quarantine) == ("expired", True)
    assert told.slots == tuple(ref.slot for ref in ticket.slots)
    assert told.generations == tuple(ref.generation for ref in ticket.slots)
    assert told.ended_ms >= 1


@pytest.mark.parametrize("kind", ["shm"])
async def test_a_writer_tells_what_it_cannot_let_go_of_yet(
    reader: Any, settings: LinkSettings
) -> None:
    links = WriterLinks(NAME, settings=settings, clock=lambda: 0.0)
    ticket = reader.reserve(tokens=4, certificate=links.certificate)
    with links.outgoing.story(ticket.transfer_id, reader=READER) as story:
        transfer = await links.transfer(ticket, sent_s=0.0, salt=reader.salt)
        story.opened(transfer)
        exporting = cffi.FFI().from_buffer(transfer.buffer(0))
        (going,) = links.transfers(KvAsk())
        assert (going.state, going.in_quarantine, going.reader) == ("writing", False, READER)
        assert not transfer.close()
        links.give_up(transfer)

    (stuck,) = links.transfers(KvAsk(ended=1))
    assert stuck.in_quarantine
    assert links.transfers(KvAsk(about=ticket.transfer_id))[0].in_quarantine

    del exporting
    links.sweep()

    (free,) = links.transfers(KvAsk(ended=1))
    assert not free.in_quarantine
    links.close()

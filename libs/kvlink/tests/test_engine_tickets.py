"""Tickets of engines that move KV themselves: sealed, leased, used once, and without slots."""

from typing import Any

import msgspec
import pytest

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import Incompatible, Refused, Unverified
from diptych_contracts.handoffs import LINK, EngineHandOff, FirstToken, HandOffTerms
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import BlockDigest, DecodeJob
from diptych_contracts.journal import Report
from diptych_contracts.transfers import Reserve, Ticket
from diptych_kvlink.agreement import check_ticket
from diptych_kvlink.incoming import IncomingTransfers
from diptych_testkit.builders import FINGERPRINT, a_generation

LAYOUT = KvLayout(layout_id="engine", engine_build="b", block_tokens=4, slot_bytes=0, dtype="f16")
TERMS = HandOffTerms(kind="toy", engine_version="1", first_token=FirstToken.PREFILL)
WRITER = Incarnation("prefill-worker-a1")


def a_reader() -> IncomingTransfers:
    return IncomingTransfers(
        LAYOUT, slots=8, lease_s=75.0, name="decode-worker-b1", fingerprint=FINGERPRINT
    )


def asking(terms: HandOffTerms = TERMS, **changes: Any) -> Reserve:
    generation = a_generation(budget_ms=600_000)
    values = {
        "transfer_id": f"{generation.request_id}.1",
        "generation": generation,
        "prefill_worker": WRITER,
        "link": LINK,
        "layout": LAYOUT,
        "fingerprint": FINGERPRINT,
        "lease_ms": 20_000,
        "hand_off": terms,
    }
    return Reserve(**(values | changes))


def a_job(ticket: Ticket, **changes: Any) -> DecodeJob:
    values = {
        "generation": a_generation(budget_ms=600_000),
        "prefill_worker": WRITER,
        "transfer_id": ticket.transfer_id,
        "first_ids": (5,),
        "blocks": (),
        "report": Report(),
        "seal": ticket.seal,
        "hand_off": EngineHandOff(terms=TERMS, opaque=b"x"),
    }
    return DecodeJob(**(values | changes))


def test_a_ticket_without_slots_is_used_once() -> None:
    reader = a_reader()
    ticket = reader.reserve(asking(), tokens=3, now_s=0.0)
    assert (ticket.slots, ticket.endpoint.kind, ticket.endpoint.slots) == ((), LINK, 0)
    check_ticket(ticket, asking(), tokens=3)
    assert reader.claim(a_job(ticket), tokens=3, now_s=1.0) == ()
    with pytest.raises(Refused, match="claimed before"):
        reader.claim(a_job(ticket), tokens=3, now_s=1.0)
    reader.release(ticket.transfer_id)
    reader.check()
    assert (reader.slots_total, reader.slots_used, reader.transfers(1.0)) == (0, 0, [])


def test_nobody_elses_job_and_no_blocks_come_under_it() -> None:
    reader = a_reader()
    ticket = reader.reserve(asking(), tokens=3, now_s=0.0)
    with pytest.raises(Refused, match="was given to"):
        reader.claim(a_job(ticket, prefill_worker=Incarnation("x")), tokens=3, now_s=1.0)
    with pytest.raises(Refused, match="without a ticket"):
        reader.claim(a_job(ticket, seal=None), tokens=3, now_s=1.0)
    block = BlockDigest(index=0, n_bytes=1, checksum=1)
    with pytest.raises(Unverified, match="expected blocks"):
        reader.claim(a_job(ticket, blocks=(block,)), tokens=3, now_s=1.0)
    reader.check()


@pytest.mark.parametrize(("orphan_ms", "lease_s"), [(0, 75.0), (30_000, 20.0)])
def test_it_never_outlasts_what_prefill_asked_for_where_kv_expires(
    orphan_ms: int, lease_s: float
) -> None:
    reader = a_reader()
    terms = msgspec.structs.replace(TERMS, orphan_ms=orphan_ms)
    ticket = reader.reserve(asking(terms), tokens=3, now_s=0.0)
    assert ticket.lease_ms == lease_s * 1000
    assert reader.sweep(lease_s - 0.1) == []
    assert reader.sweep(lease_s) == [ticket.transfer_id]
    with pytest.raises(Refused, match="ticket_expired"):
        reader.claim(a_job(ticket), tokens=3, now_s=lease_s)
    reader.check()


def test_other_links_and_other_layouts_stay_apart() -> None:
    reader = a_reader()
    with pytest.raises(Refused, match="link 'shm'; expected 'engine'"):
        reader.reserve(asking(link="shm"), tokens=3, now_s=0.0)
    through_slots = msgspec.structs.replace(LAYOUT, slot_bytes=100)
    with pytest.raises(Incompatible, match="slot_bytes"):
        reader.reserve(asking(layout=through_slots), tokens=3, now_s=0.0)
    smaller = msgspec.structs.replace(LAYOUT, block_tokens=2)
    assert reader.reserve(asking(layout=smaller), tokens=3, now_s=0.0).slots == ()

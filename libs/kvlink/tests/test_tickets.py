"""Attempts to use a ticket that is not one's own, not whole, or not good any more: each fails."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import Incompatible, Refused
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.tickets import TicketFault, TicketSeal
from diptych_contracts.transfers import SlotRef
from diptych_contracts.wire import encode
from diptych_kvlink.agreement import check_ticket
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.sealing import BadTicket, TicketOffice, slots_digest
from diptych_testkit.builders import a_generation

LAYOUT = KvLayout(layout_id="l", engine_build="b", block_tokens=4, slot_bytes=100, dtype="f16")
WRITER, OTHER = Incarnation("prefill-worker-a1"), Incarnation("prefill-worker-b2")
ALTERED = [
    {"transfer_id": transfer_id(RequestId("r2"), 1)},
    {"request_id": RequestId("r2")},
    {"attempt": 2},
    {"tenant": "theirs"},
    {"writer": OTHER},
    {"slots": bytes(32)},
    {"expires_ms": 10**15},
    {"mac": b""},
    {"mac": bytes(32)},
]


def written(reader: Any, request: str = "r1", **changes: Any) -> Any:
    ticket = reader.reserve(request, **changes)
    return ticket, reader.job(ticket, reader.write(ticket))


def is_refused(reader: Any, job: Any, fault: TicketFault, now_s: float = 1.0) -> None:
    with pytest.raises(BadTicket) as caught:
        reader.incoming.claim(job, tokens=10, now_s=now_s)
    assert caught.value.fault is fault
    assert caught.value.reason == "unknown_ticket"


def of(job: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(job, **changes)


# Handing over


def test_a_job_without_a_ticket_is_refused_and_its_holder_may_still_come(reader: Any) -> None:
    _, job = written(reader)
    is_refused(reader, of(job, seal=None), TicketFault.MISSING)
    assert len(reader.incoming.claim(job, tokens=10, now_s=1.0)) == 3


@pytest.mark.parametrize("changes", ALTERED, ids=lambda c: next(iter(c)))
def test_an_altered_ticket_is_refused_and_its_holder_may_still_come(
    reader: Any, changes: Any
) -> None:
    ticket, job = written(reader)
    is_refused(reader, of(job, seal=of(ticket.seal, **changes)), TicketFault.ALTERED)
    assert len(reader.incoming.claim(job, tokens=10, now_s=1.0)) == 3


def test_another_workers_ticket_is_no_ticket_here(make_reader: Callable[..., Any]) -> None:
    """Nor is one of an earlier life: each process has a secret of its own."""
    here, elsewhere = make_reader(), make_reader()
    _, job = written(here)
    theirs = elsewhere.reserve()
    is_refused(here, of(job, seal=theirs.seal), TicketFault.ALTERED)


def test_a_replayed_ticket_is_refused(reader: Any) -> None:
    ticket, job = written(reader)
    reader.incoming.claim(job, tokens=10, now_s=1.0)
    is_refused(reader, job, TicketFault.USED)
    reader.incoming.release(ticket.transfer_id)
    is_refused(reader, job, TicketFault.USED)


@pytest.mark.parametrize("end", ["given up", "released"])
def test_a_ticket_that_has_ended_is_refused(reader: Any, end: str) -> None:
    ticket, job = written(reader)
    match end:
        case "given up":
            reader.incoming.release(ticket.transfer_id)
        case "released":
            reader.incoming.writer_stopped(ticket.transfer_id)
    is_refused(reader, job, TicketFault.USED)


@pytest.mark.parametrize("swept", [False, True])
def test_an_expired_ticket_is_refused(reader: Any, swept: bool) -> None:
    _, job = written(reader)
    if swept:
        reader.incoming.sweep(10.0)
    is_refused(reader, job, TicketFault.EXPIRED, now_s=10.0)


def test_a_ticket_that_was_renewed_ends_on_its_own_date(reader: Any) -> None:
    first, job = written(reader)
    second = reader.reserve(now_s=9.0)
    is_refused(reader, of(job, seal=first.seal), TicketFault.EXPIRED, now_s=12.0)
    assert len(reader.incoming.claim(of(job, seal=second.seal), tokens=10, now_s=12.0)) == 3


def test_another_tenants_ticket_is_refused(reader: Any) -> None:
    _, job = written(reader)
    theirs = of(job, generation=of(job.generation, tenant="theirs"))
    is_refused(reader, theirs, TicketFault.TENANT)


@pytest.mark.parametrize(("request_name", "attempt"), [("r2", 1), ("r1", 2)])
def test_another_requests_or_attempts_ticket_is_refused(
    reader: Any, request_name: str, attempt: int
) -> None:
    """Both are open, of one tenant and one writer; each has its own."""
    _, job = written(reader)
    other, other_job = written(reader, request_name, attempt=attempt)
    is_refused(reader, of(job, seal=other.seal), TicketFault.REQUEST)
    is_refused(reader, of(job, transfer_id=other.transfer_id), TicketFault.REQUEST)
    for right in (job, other_job):
        assert len(reader.incoming.claim(right, tokens=10, now_s=1.0)) == 3


def test_another_writers_ticket_is_refused(reader: Any) -> None:
    _, job = written(reader)
    is_refused(reader, of(job, prefill_worker=OTHER), TicketFault.WRITER)


def test_nobody_gets_a_ticket_a_second_time_in_another_writers_name(reader: Any) -> None:
    """A `Reserve` is answered to who asks: its repetition must come from the same process."""
    reader.reserve()
    with pytest.raises(Refused, match="is in use"):
        reader.reserve(certificate=LinkIdentity().certificate)
    reader.reserve()


def test_a_ticket_is_for_one_link(reader: Any) -> None:
    first, job = written(reader)
    reader.kind = "tcp" if reader.kind == "shm" else "shm"
    reader.reserve()
    is_refused(reader, of(job, seal=first.seal), TicketFault.SLOTS)


def test_the_listing_says_what_crosses_encrypted(reader: Any) -> None:
    ticket, _ = written(reader)
    (open_one,) = reader.incoming.transfers(1.0)
    reader.incoming.writer_stopped(ticket.transfer_id)
    (over,) = reader.incoming.transfers(1.0, ended=1)
    assert {one.tls for one in (open_one, over)} == {reader.kind == "tcp"}


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": transfer_id(RequestId("r2"), 1)},
        {"attempt": 2},
        {"slots": (SlotRef(slot=0, generation=1),) * 2},
        {"slots": (SlotRef(slot=0, generation=1),) * 40_000},
        {"slots": (SlotRef(slot=8, generation=1),) * 3},
        {"slots": (SlotRef(slot=-1, generation=1),) * 3},
        {"endpoint": {"kind": "rdma"}},
        {"endpoint": {"slot_bytes": 2**60}},
        {"layout": {"slot_bytes": 2**60}},
        {"seal": None},
    ],
)
def test_an_answer_that_is_none_to_the_question_is_not_worked_with(
    reader: Any, changes: dict[str, Any]
) -> None:
    """Its numbers would become memory of the writer's."""
    ticket = reader.reserve()
    check_ticket(ticket, reader.request(), tokens=10)
    bent = {
        name: of(getattr(ticket, name), **change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    with pytest.raises(Incompatible):
        check_ticket(of(ticket, **bent), reader.request(), tokens=10)


# Writing over tcp


only_tcp = pytest.mark.parametrize("kind", ["tcp"])


def write_is_refused(reader: Any, ticket: Any, seal: TicketSeal | None, fault: TicketFault) -> None:
    """Bytes under `seal` for the first slot of `ticket` are thrown away, answered and counted."""
    before = reader.memory(ticket.slots[0])
    with pytest.raises(BadTicket) as caught:
        reader.put(of(ticket, seal=seal), 0, b"forged")
    assert caught.value.fault is fault
    assert reader.memory(ticket.slots[0]) == before
    assert reader.incoming.take_refusals() == {fault: 1}


@only_tcp
def test_a_write_without_a_ticket_is_refused(reader: Any) -> None:
    write_is_refused(reader, reader.reserve(), None, TicketFault.MISSING)


@only_tcp
@pytest.mark.parametrize("changes", ALTERED, ids=lambda c: next(iter(c)))
def test_a_write_under_an_altered_ticket_is_refused(reader: Any, changes: Any) -> None:
    ticket = reader.reserve()
    write_is_refused(reader, ticket, of(ticket.seal, **changes), TicketFault.ALTERED)
    job = reader.job(ticket, reader.write(ticket))
    assert len(reader.incoming.claim(job, tokens=10, now_s=1.0)) == 3


@only_tcp
@pytest.mark.parametrize("noise", [b"\xc1", b"\x80", b"noise" * 9])
def test_a_write_under_noise_is_refused(reader: Any, noise: bytes) -> None:
    ticket, link = reader.reserve(), reader.link()
    link.send([(ticket.slots[0], memoryview(b"forged"))], noise)
    with pytest.raises(BadTicket, match="ticket_altered"):
        link.confirm()


@only_tcp
def test_a_write_under_another_requests_ticket_is_refused(reader: Any) -> None:
    """Even the same writer's: one request's bytes never reach another's slots."""
    mine, other = reader.reserve("r1"), reader.reserve("r2")
    write_is_refused(reader, mine, other.seal, TicketFault.REQUEST)


@only_tcp
def test_a_write_under_another_writers_ticket_is_refused(reader: Any) -> None:
    ticket, theirs = reader.reserve("r1"), reader.reserve("r2", prefill_worker=OTHER)
    write_is_refused(reader, ticket, theirs.seal, TicketFault.WRITER)
    reader.writer = OTHER
    write_is_refused(reader, ticket, theirs.seal, TicketFault.WRITER)


@only_tcp
def test_a_write_under_a_used_ticket_is_refused(reader: Any) -> None:
    ticket, job = written(reader)
    reader.incoming.claim(job, tokens=10, now_s=1.0)
    write_is_refused(reader, ticket, ticket.seal, TicketFault.USED)
    reader.incoming.release(ticket.transfer_id)
    write_is_refused(reader, ticket, ticket.seal, TicketFault.USED)


@only_tcp
def test_a_write_under_an_expired_ticket_is_refused_before_anybody_sweeps(reader: Any) -> None:
    ticket = reader.reserve(now_s=-20.0)  # The link's own clock stands at 0.
    write_is_refused(reader, ticket, ticket.seal, TicketFault.EXPIRED)


# The seal itself


def test_a_seal_says_nothing_of_its_secret_and_two_offices_differ() -> None:
    seals = [
        TicketOffice(lambda: 0.0).seal(a_generation("r1"), WRITER, slots=b"", deadline_s=1.0)
        for _ in range(2)
    ]
    assert seals[0].mac != seals[1].mac
    assert {len(seal.mac) for seal in seals} == {32}
    assert of(seals[0], mac=b"") == of(seals[1], mac=b"")


def test_other_slots_generations_links_and_layouts_have_other_digests() -> None:
    refs = (SlotRef(slot=1, generation=2), SlotRef(slot=3, generation=4))
    digests = {
        slots_digest("tcp", LAYOUT, refs),
        slots_digest("shm", LAYOUT, refs),
        slots_digest("tcp", of(LAYOUT, slot_bytes=101), refs),
        slots_digest("tcp", LAYOUT, refs[::-1]),
        slots_digest("tcp", LAYOUT, refs[:1]),
        slots_digest("tcp", LAYOUT, (SlotRef(slot=1, generation=3), refs[1])),
    }
    assert len(digests) == 6


def test_a_seal_is_checked_in_the_giver_only() -> None:
    seal = TicketOffice(lambda: 0.0).seal(a_generation("r1"), WRITER, slots=b"", deadline_s=1.0)
    with pytest.raises(Refused, match="not sealed like this by this worker"):
        TicketOffice(lambda: 0.0).check_write(encode(seal), WRITER)

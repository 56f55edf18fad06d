import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cffi
import msgspec
import numpy as np
import pytest

from diptych_contracts.cards import Fingerprint
from diptych_contracts.errors import Incompatible, Refused, Unverified
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import BlockDigest
from diptych_contracts.prompts import PromptRef
from diptych_kvlink.presence import Presence
from diptych_kvlink.verifying import checksum, context_salt

Make = Callable[..., Any]
only_shm = pytest.mark.parametrize("kind", ["shm"])
only_tcp = pytest.mark.parametrize("kind", ["tcp"])


def changed(block: BlockDigest, **changes: int) -> BlockDigest:
    return msgspec.structs.replace(block, **changes)


def written(reader: Any, request: str = "r1", *, tokens: int = 10, now_s: float = 0.0) -> Any:
    ticket = reader.reserve(request, tokens=tokens, now_s=now_s)
    return ticket, reader.job(ticket, reader.write(ticket, tokens=tokens))


def until(look: Callable[[], Any]) -> Any:
    give_up_s = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    return found


def test_blocks_arrive_as_they_were_written(reader: Any) -> None:
    ticket, job = written(reader)

    blocks = reader.incoming.claim(job, tokens=10, now_s=1.0)

    assert [(block.p0, block.p1, len(block.data)) for block in blocks] == [
        (0, 4, 6000),
        (4, 8, 6000),
        (8, 10, 3000),
    ]
    assert bytes(blocks[2].data).startswith(b"r1.1/2;")
    assert all(block.data.readonly for block in blocks)
    assert (reader.incoming.slots_used, reader.incoming.slots_quarantined) == (3, 0)
    reader.incoming.release(ticket.transfer_id)
    assert reader.incoming.slots_used == 0


def test_a_flipped_bit_fails_closed(reader: Any) -> None:
    ticket, job = written(reader)
    spoiled = bytearray(reader.memory(ticket.slots[1]))
    spoiled[4321] ^= 1
    reader.put(ticket, 1, spoiled)

    with pytest.raises(Unverified, match="block 1 has checksum"):
        reader.incoming.claim(job, tokens=10, now_s=1.0)

    with pytest.raises(Refused, match="failed") as caught:
        reader.incoming.claim(job, tokens=10, now_s=1.0)
    assert caught.value.reason == "unknown_ticket"
    assert reader.incoming.slots_used == reader.incoming.slots_quarantined == reader.quarantined(3)
    reader.incoming.writer_stopped(ticket.transfer_id)
    assert reader.incoming.slots_used == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda blocks: blocks[:2],
        lambda blocks: (*blocks, changed(blocks[2], index=3)),
        lambda blocks: (blocks[1], blocks[0], blocks[2]),
        lambda blocks: (blocks[0], changed(blocks[1], n_bytes=5999), blocks[2]),
        lambda blocks: (blocks[0], changed(blocks[1], n_bytes=6001), blocks[2]),
        lambda blocks: (*blocks[:2], changed(blocks[2], n_bytes=2999)),
        lambda blocks: (*blocks[:2], changed(blocks[2], n_bytes=0)),
        lambda blocks: (blocks[0], changed(blocks[1], index=0), blocks[2]),
        lambda blocks: (),
    ],
)
def test_blocks_that_are_not_the_tickets_fail_closed(reader: Any, spoil: Any) -> None:
    ticket, job = written(reader)
    spoiled = reader.job(ticket, spoil(job.blocks))

    with pytest.raises(Unverified):
        reader.incoming.claim(spoiled, tokens=10, now_s=1.0)

    assert reader.incoming.slots_quarantined == reader.quarantined(3)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": (1, 2, 4)},
        {"prompt_ids": (1, 2), "prefix_ids": (3,)},
        {"prompt": PromptRef(name="n", digest="d", tokens=3, width=2)},
    ],
)
def test_another_prompts_job_is_refused(reader: Any, changes: Any) -> None:
    _, job = written(reader)
    stolen = msgspec.structs.replace(
        job, generation=msgspec.structs.replace(job.generation, **changes)
    )
    with pytest.raises(Unverified, match="another tenant, model or prompt") as caught:
        reader.incoming.claim(stolen, tokens=10, now_s=1.0)
    assert caught.value.reason == "context"


def test_a_block_of_another_tenant_has_another_checksum(reader: Any) -> None:
    """Whatever puts it there: its bytes are whole, but they are not this context's."""
    ticket, job = written(reader)
    theirs = msgspec.structs.replace(job.generation, tenant="other")
    salt = context_salt(theirs, "base-1")
    block = job.blocks[0]
    data = reader.memory(ticket.slots[0])[: block.n_bytes]
    foreign = changed(block, checksum=checksum(memoryview(data), salt))
    with pytest.raises(Unverified, match="block 0 has checksum") as caught:
        reader.incoming.claim(reader.job(ticket, (foreign, *job.blocks[1:])), tokens=10, now_s=1.0)
    assert caught.value.reason == "checksum"


def test_a_claim_for_another_length_fails_closed(reader: Any) -> None:
    _, job = written(reader)

    with pytest.raises(Unverified, match="of 10 tokens"):
        reader.incoming.claim(job, tokens=9, now_s=1.0)


def test_a_claim_cannot_be_replayed(reader: Any) -> None:
    ticket, job = written(reader)
    reader.incoming.claim(job, tokens=10, now_s=1.0)

    with pytest.raises(Refused, match="claimed before"):
        reader.incoming.claim(job, tokens=10, now_s=1.0)
    reader.incoming.release(ticket.transfer_id)
    with pytest.raises(Refused, match="released: imported"):
        reader.incoming.claim(job, tokens=10, now_s=1.0)


def test_only_the_holder_can_claim_and_a_wrong_claim_harms_nobody(reader: Any) -> None:
    """A stale reference once returned another prompt's answer (vllm-project/vllm #52234)."""
    ticket, job = written(reader)
    other_attempt = reader.request(attempt=2).generation
    wrong_jobs = [
        reader.job(ticket, job.blocks, transfer_id="r9.1"),
        reader.job(ticket, job.blocks, generation=other_attempt),
        reader.job(ticket, job.blocks, prefill_worker=Incarnation("prefill-worker-b2")),
    ]

    for wrong in wrong_jobs:
        with pytest.raises(Refused) as caught:
            reader.incoming.claim(wrong, tokens=10, now_s=1.0)
        assert caught.value.reason == "unknown_ticket"

    assert len(reader.incoming.claim(job, tokens=10, now_s=1.0)) == 3


def test_a_repeated_reservation_renews_the_same_ticket(reader: Any) -> None:
    first = reader.reserve(now_s=0.0)

    again = reader.reserve(now_s=9.0)

    assert msgspec.structs.replace(again, seal=first.seal) == first
    assert again.seal.expires_ms == first.seal.expires_ms + 9000
    assert reader.incoming.sweep(18.9) == []
    assert reader.incoming.sweep(19.0) == [first.transfer_id]


def test_a_reservation_is_not_granted_again_after_its_end(reader: Any) -> None:
    ticket = reader.reserve()
    reader.incoming.writer_stopped(ticket.transfer_id)

    with pytest.raises(Refused, match="released by the writer") as caught:
        reader.reserve()

    assert caught.value.reason == "expired"
    assert reader.incoming.slots_used == 0


def test_another_writer_cannot_take_a_ticket_over(reader: Any) -> None:
    reader.reserve()

    with pytest.raises(Refused, match="in use"):
        reader.reserve(prefill_worker=Incarnation("prefill-worker-b2"))


def test_the_lease_is_never_longer_than_the_requests_budget(reader: Any) -> None:
    assert reader.reserve(budget_ms=1500).lease_ms == 1500
    with pytest.raises(Refused) as caught:
        reader.reserve("r2", budget_ms=0)
    assert caught.value.reason == "expired"


def test_an_expired_ticket_cannot_be_claimed_and_its_slots_wait_for_the_writer(reader: Any) -> None:
    ticket, job = written(reader)

    with pytest.raises(Refused, match="deadline of state reserved passed"):
        reader.incoming.claim(job, tokens=10, now_s=10.0)

    assert reader.incoming.slots_used == reader.incoming.slots_quarantined == reader.quarantined(3)
    reader.incoming.writer_stopped(ticket.transfer_id)
    assert reader.incoming.slots_used == 0


def test_a_claimed_ticket_expires_but_its_slots_wait_for_the_reader(reader: Any) -> None:
    ticket, job = written(reader)
    blocks = reader.incoming.claim(job, tokens=10, now_s=1.0)

    assert reader.incoming.sweep(11.0) == [ticket.transfer_id]

    assert bytes(blocks[0].data).startswith(b"r1.1/0;")
    assert reader.incoming.slots_quarantined == 3
    reader.incoming.release(ticket.transfer_id)
    assert reader.incoming.slots_used == 0
    with pytest.raises(ValueError, match="released memoryview"):
        bytes(blocks[0].data)


def test_a_late_release_of_the_writer_does_not_pull_blocks_from_under_the_engine(
    reader: Any,
) -> None:
    ticket, job = written(reader)
    blocks = reader.incoming.claim(job, tokens=10, now_s=1.0)

    reader.incoming.writer_stopped(ticket.transfer_id)

    assert reader.incoming.slots_used == 3
    assert bytes(blocks[0].data).startswith(b"r1.1/0;")


def test_a_slot_an_engine_still_reads_is_not_reused(make_reader: Make) -> None:
    reader = make_reader(slots=3)
    ticket, job = written(reader)
    blocks = reader.incoming.claim(job, tokens=10, now_s=1.0)
    pointer = cffi.FFI().from_buffer(blocks[0].data)

    reader.incoming.release(ticket.transfer_id)

    with pytest.raises(Refused, match="0 of 3 are free"):
        reader.reserve("r2")
    del pointer
    assert reader.incoming.sweep(1.0) == []
    assert reader.incoming.slots_used == 0


@only_shm
def test_a_late_write_cannot_hit_a_reused_slot(make_reader: Make) -> None:
    """A frozen writer woke up and overwrote blocks that belonged to another request by then."""
    reader = make_reader(slots=6)
    ticket = reader.reserve("r1")
    frozen = reader.link().buffer(ticket.slots[0])
    reader.incoming.sweep(10.0)
    reader.incoming.sweep(10.25)
    other, job = written(reader, "r2", now_s=10.25)

    frozen[:] = b"\xff" * len(frozen)

    blocks = reader.incoming.claim(job, tokens=10, now_s=11.0)
    assert bytes(blocks[0].data).startswith(b"r2.1/0;")
    assert not {ref.slot for ref in ticket.slots} & {ref.slot for ref in other.slots}


@pytest.mark.parametrize("end", ["expired", "given up", "claimed", "writer lost", "released"])
def test_a_thawed_writer_that_asks_is_refused(reader: Any, end: str) -> None:
    ticket, job = written(reader)
    link = reader.link()
    match end:
        case "expired":
            reader.incoming.sweep(10.0)
        case "given up":
            reader.incoming.release(ticket.transfer_id)
        case "claimed":
            reader.incoming.claim(job, tokens=10, now_s=1.0)
        case "writer lost":
            reader.incoming.writer_lost(job.prefill_worker)
        case "released":
            reader.incoming.writer_stopped(ticket.transfer_id)

    with pytest.raises(Refused) as caught:
        reader.put(ticket, 0, b"late", link)
    assert caught.value.reason == "unknown_ticket"


def test_a_ticket_the_reader_gives_up_waits_for_the_writer(reader: Any) -> None:
    ticket = reader.reserve()

    reader.incoming.release(ticket.transfer_id)

    assert reader.incoming.slots_quarantined == reader.quarantined(3)
    reader.incoming.writer_stopped(ticket.transfer_id)
    assert reader.incoming.slots_used == 0


@only_shm
def test_slots_of_a_lost_writer_are_free_once_it_is_proved_dead(
    reader: Any, writer_presence: Presence
) -> None:
    ticket, _ = written(reader)

    assert reader.incoming.writer_lost(Incarnation("prefill-worker-b2")) == []
    assert reader.incoming.writer_lost(Incarnation("prefill-worker-a1")) == [ticket.transfer_id]
    for now_s in (1.0, 2.0):
        reader.incoming.sweep(now_s)
    assert reader.incoming.slots_quarantined == 3

    writer_presence.close()
    assert reader.incoming.sweep(3.0) == []
    assert reader.incoming.slots_used == 0


@only_shm
def test_a_dead_writer_is_noticed_without_being_told(
    reader: Any, writer_presence: Presence
) -> None:
    ticket = reader.reserve()
    claimed, job = written(reader, "r2")
    reader.incoming.claim(job, tokens=10, now_s=1.0)

    writer_presence.close()

    assert reader.incoming.sweep(1.0) == [ticket.transfer_id]
    assert reader.incoming.slots_used == len(claimed.slots)


@only_shm
def test_a_writer_that_never_announced_itself_is_never_proved_dead(reader: Any) -> None:
    written(reader)

    reader.incoming.writer_lost(Incarnation("prefill-worker-a1"))
    for now_s in (100.0, 200.0, 300.0):
        reader.incoming.sweep(now_s)

    assert reader.incoming.slots_quarantined == 3


def test_slots_no_writer_ever_opened_are_free_soon_after_the_end(reader: Any) -> None:
    """The ticket was lost on its way, or its writer gave up without a word."""
    reader.reserve()

    assert reader.incoming.sweep(10.0) == ["r1.1"]
    assert reader.incoming.slots_quarantined == reader.quarantined(3)
    assert reader.incoming.sweep(10.25) == []

    reader.sweep_until_free(10.5)


@only_shm
def test_slots_the_writer_closed_are_free_though_its_release_was_lost(reader: Any) -> None:
    """Freeing once hung on one message from the peer (vllm-project/vllm #46283)."""
    ticket, _ = written(reader)
    reader.incoming.sweep(10.0)
    reader.incoming.sweep(10.25)
    assert reader.incoming.slots_quarantined == 3

    for ref in ticket.slots[:2]:
        reader.links[0].stop(ref)
    reader.incoming.sweep(10.5)
    assert reader.incoming.slots_quarantined == 3

    reader.links[0].stop(ticket.slots[2])
    reader.incoming.sweep(10.75)
    assert reader.incoming.slots_used == 0


def test_exhaustion_is_refused_and_ends_when_slots_come_back(make_reader: Make) -> None:
    reader = make_reader(slots=4)
    first = reader.reserve("r1")

    with pytest.raises(Refused) as caught:
        reader.reserve("r2")
    assert caught.value.reason == "no_room"

    reader.incoming.writer_stopped(first.transfer_id)
    assert len(reader.reserve("r2").slots) == 3


def test_a_layout_that_differs_is_named_field_by_field(reader: Any) -> None:
    layout = msgspec.structs.replace(reader.request().layout, engine_build="test-2", dtype="q8_0")

    with pytest.raises(
        Incompatible, match=r"engine_build \(expected 'test-1', got 'test-2'\).*dty"
    ):
        reader.reserve(layout=layout)
    with pytest.raises(Incompatible, match="model fingerprint differs in base"):
        reader.reserve(fingerprint=Fingerprint(base="base-2", weights="Q4_1"))
    assert reader.incoming.slots_used == 0


@pytest.mark.parametrize("changes", [{"transfer_id": "r1.7"}, {"tokens": 0}])
def test_a_reservation_that_contradicts_itself_is_refused(
    reader: Any, changes: dict[str, Any]
) -> None:
    with pytest.raises(Incompatible, match=r"expected transfer r1\.1"):
        reader.reserve(**changes)


def test_an_unknown_link_is_refused(reader: Any) -> None:
    with pytest.raises(Refused) as caught:
        reader.reserve(link="rdma")
    assert caught.value.reason == "unsupported"


@only_tcp
def test_a_late_write_over_tcp_changes_no_byte_of_a_reused_slot(make_reader: Make) -> None:
    reader = make_reader(slots=3)
    ticket = reader.reserve("r1")
    late = reader.link()
    buffer = late.buffer(ticket.slots[0])
    reader.incoming.sweep(10.0)
    other, job = written(reader, "r2", now_s=10.0)
    assert {ref.slot for ref in ticket.slots} == {ref.slot for ref in other.slots}

    late.send([(ticket.slots[0], buffer)])
    with pytest.raises(Refused, match="closed for generation 1"):
        late.confirm()

    blocks = reader.incoming.claim(job, tokens=10, now_s=11.0)
    assert bytes(blocks[0].data).startswith(b"r2.1/0;")


@only_tcp
def test_a_writer_whose_connection_ended_loses_its_tickets_and_they_are_free_at_once(
    reader: Any,
) -> None:
    ticket, _ = written(reader)
    claimed, job = written(reader, "r2")
    reader.incoming.claim(job, tokens=10, now_s=1.0)
    assert reader.incoming.sweep(1.0) == []

    while reader.links:
        reader.links.pop().close()
    ended = until(lambda: reader.incoming.sweep(1.0))

    assert ended == [ticket.transfer_id]
    assert reader.incoming.slots_used == len(claimed.slots)
    assert reader.reserve("r3")
    assert reader.incoming.sweep(1.0) == []


def test_a_ticket_moves_to_another_link_and_the_first_one_is_closed(reader: Any) -> None:
    first = reader.reserve()
    link, reader.kind = reader.link(), "tcp" if reader.kind == "shm" else "shm"

    second = reader.reserve(now_s=1.0)

    assert second.slots == first.slots
    assert second.endpoint.kind == reader.kind
    with pytest.raises(Refused):
        reader.put(first, 0, b"x" * 6000, link)
    job = reader.job(second, reader.write(second))
    assert len(reader.incoming.claim(job, tokens=10, now_s=2.0)) == 3


def test_all_links_share_one_memory(reader: Any) -> None:
    targets = reader.incoming._held.targets
    ticket, _ = written(reader)

    for ref in ticket.slots:
        (seen,) = {bytes(target.view(ref.slot, 6000)) for target in targets}
        assert seen != bytes(6000)


def test_ids_nobody_knows_change_nothing(reader: Any) -> None:
    reader.incoming.release("r9.1")
    reader.incoming.writer_stopped("r9.1")

    assert reader.incoming.sweep(99.0) == []


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_close_leaves_neither_file_nor_descriptor(make_reader: Make, tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    reader = make_reader()
    ticket, job = written(reader)
    blocks = reader.incoming.claim(job, tokens=10, now_s=1.0)
    array = np.frombuffer(blocks[0].data, dtype=np.uint8)

    reader.links.pop().close()
    reader.incoming.close()

    assert list(tmp_path.iterdir()) == []
    assert bytes(array[:7]) == b"r1.1/0;"
    reader.incoming.release(ticket.transfer_id)
    del array, blocks
    gc.collect()
    # Never fewer by this: but what tests before left to a thread may be closed only now.
    assert len(os.listdir("/proc/self/fd")) <= before


def test_every_transfer_is_told_of_until_its_slots_are_free(reader: Any) -> None:
    reader.reserve("r1", tokens=10, now_s=1.0)
    _, job = written(reader, "r2", now_s=2.0)
    reader.incoming.claim(job, tokens=10, now_s=3.0)

    first, second = reader.incoming.transfers(5.0, ended=5)

    assert (first.transfer_id, first.state, first.age_ms) == ("r1.1", "reserved", 4000)
    assert (first.n_bytes, first.reason) == (3 * 6000, "")
    assert first.link == second.link in ("shm", "nixl", "tcp")
    assert (second.state, second.age_ms, second.n_bytes) == ("verified", 3000, 15000)
    assert first.left_ms > 0
    assert first.writer == second.writer != ""


def test_those_that_are_over_are_told_of_if_asked_for(reader: Any) -> None:
    for request in ("r1", "r2"):
        ticket, job = written(reader, request)
        reader.incoming.claim(job, tokens=10, now_s=1.0)
        reader.incoming.release(ticket.transfer_id)

    assert reader.incoming.transfers(5.0) == []
    (last,) = reader.incoming.transfers(5.0, ended=1)
    assert (last.transfer_id, last.state, last.reason) == ("r2.1", "released", "imported")
    assert (last.writer, last.link, last.n_bytes) == (reader.writer, reader.kind, 15000)


def test_a_reservation_beyond_all_memory_is_refused_before_any_is_taken(reader: Any) -> None:
    with pytest.raises(Refused, match="needs 250000000000000 transfer slots") as caught:
        reader.reserve(tokens=10**15)
    assert caught.value.reason == "no_room"


def test_token_ids_that_no_model_has_are_refused_and_cost_no_slot(reader: Any) -> None:
    request = reader.request()
    ticket = reader.incoming.reserve(request, tokens=10, now_s=0.0)
    base = request.generation
    used = reader.incoming.slots_used
    wrong = msgspec.structs.replace(base, request_id="r2", prompt_ids=(2**40,))
    with pytest.raises(Incompatible, match="token ids of 31 bits in r2"):
        reader.reserve("r2", generation=wrong)
    assert reader.incoming.slots_used == used

    wrong = msgspec.structs.replace(base, prompt_ids=(-(2**40),))
    job = reader.job(ticket, (), generation=wrong)
    with pytest.raises(Unverified, match="token ids of 31 bits in r1"):
        reader.incoming.claim(job, tokens=10, now_s=0.0)
    reader.incoming.check()

"""Every fault of a transfer on every link, between real processes that are killed and frozen.

Each says how it is reported on both sides: what the writer's hand-off raises, and what stands in
the reader's ledger. After each, nothing is held and nothing wrong was decoded. What the bus carries
between them is carried by hand; with a bus, and with real engines: `tests/live/test_kv_faults.py`.
"""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.jobs import BlockDigest
from diptych_kvlink import batching, nixl_writer, outgoing, tcp_stream
from diptych_kvlink.links import LinkSettings
from diptych_kvlink.nixl_library import why_absent
from diptych_testkit.kv_pair import Pair, PeerFailed, until
from diptych_testkit.kv_peer import BLOCK_BYTES, WRITER

pytestmark = pytest.mark.timeout(240)

needs_nixl = pytest.mark.skipif(bool(why_absent()), reason="NIXL is not here: make nixl")
LINKS = [
    "shm",
    "tcp",
    pytest.param("nixl/tcp", marks=needs_nixl),
    pytest.param("nixl/tcp,cma", marks=needs_nixl),
]
BLOCKS = 3
GONE = "its reader is gone|the peer is gone|the peer has closed|receiving failed|sending failed"
Make = Callable[..., Pair]


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(tmp_path: Path, link: str) -> Iterator[Make]:
    pairs: list[Pair] = []

    def made(**more: Any) -> Pair:
        pairs.append(Pair(link, tmp_path, **more))
        return pairs[-1]

    yield made
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(make: Make) -> Pair:
    return make()


def waits_for_writers(link: str) -> bool:
    """Whether slots of an ended transfer are kept until their writer lets go of them."""
    return link != "tcp"


def and_then_all_is_well(pair: Pair, request: str = "r9", slots: int = 8) -> None:
    """Nothing is held, and all slots carry the next transfer.

    The next but one, where the end of a broken connection is only seen after the next has begun.
    """
    pair.until_free()
    tries = iter(range(100))
    until(lambda: is_carried(pair, f"{request}-{next(tries)}", slots))
    pair.until_free()


def is_carried(pair: Pair, request: str, slots: int) -> bool:
    try:
        pair.carries(request, "Z", blocks=slots)
    except PeerFailed as failed:
        pair.withdraw(request, failed.why)
        pair.until_free()
        return False
    return True


def altered(digests: tuple[BlockDigest, ...], index: int, **changes: Any) -> tuple[Any, ...]:
    return tuple(
        msgspec.structs.replace(digest, **changes) if digest.index == index else digest
        for digest in digests
    )


# The peer dies


def test_a_reader_that_dies_before_the_first_block_is_noticed(pair: Pair) -> None:
    ticket = pair.reserve("r1")
    pair.reader.kill()
    try:
        pair.use(ticket)
    except PeerFailed as failed:
        why = f"{failed.kind}: {failed.why}"
    else:
        why = pair.writer.ask("fails", transfer="r1.1", within_s=60)
    assert re.search(f"LinkBroken|{GONE}", why), why


def test_a_reader_that_dies_among_the_blocks_is_noticed_while_nothing_is_sent(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", [0], "A")
    pair.reader.kill()

    why = pair.writer.ask("fails", transfer="r1.1", within_s=60)
    assert re.search(GONE, why), why

    pair.write("r1", [1, 2], "A")  # The engine goes on, and neither waits nor fails.
    with pytest.raises(PeerFailed, match=GONE):
        pair.digests("r1")
    until(lambda: bool(pair.writer.ask("close", transfer="r1.1")))
    assert pair.writer.ask("look")["unfinished"] == 0


def test_a_reader_that_dies_before_the_hand_over_is_known_to_be_gone(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", range(BLOCKS), "A")
    assert len(pair.digests("r1")) == BLOCKS
    pair.reader.kill()

    assert pair.writer.ask("gone", transfer="r1.1", within_s=60)
    until(lambda: bool(pair.writer.ask("close", transfer="r1.1")))


def test_a_writer_that_dies_before_the_first_block_is_noticed(pair: Pair) -> None:
    pair.reserve("r1")
    pair.writer.kill()

    assert pair.until_stands("r1", "failed") == f"writer {WRITER} died"
    pair.until_free()


def test_a_writer_that_dies_in_mid_block_is_noticed(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", [0], "A")
    pair.writer.ask("begin", transfer="r1.1", index=1, sign="A")
    pair.writer.kill()

    assert pair.until_stands("r1", "failed") == f"writer {WRITER} died"
    pair.until_free()


def test_what_a_writer_wrote_before_it_died_is_not_decoded_once_that_is_known(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", range(BLOCKS), "A")
    digests = pair.digests("r1")
    pair.writer.kill()

    assert pair.until_stands("r1", "failed") == f"writer {WRITER} died"
    with pytest.raises(PeerFailed, match=f"writer {WRITER} died"):
        pair.claim("r1", digests)
    pair.until_free()


def test_what_was_handed_over_outlives_its_writer(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", range(BLOCKS), "A")
    digests = pair.digests("r1")
    assert pair.claim("r1", digests) == ["A"] * BLOCKS
    pair.writer.kill()

    assert pair.stands("r1") == ("released", "imported")
    pair.until_free()


# The peer is frozen


def test_a_writer_frozen_in_mid_block_is_given_up_and_harms_nobody_when_it_thaws(
    make: Make, link: str
) -> None:
    """And the late write into reused blocks: what it goes on to send must not be found there."""
    pair = make(slots=BLOCKS, stall_s=60.0)
    pair.open("r1")
    pair.writer.ask("begin", transfer="r1.1", index=0, sign="L")
    pair.writer.signal(signal.SIGSTOP)
    pair.reader.ask("cancel", transfer="r1.1")  # by its owner, who misses the writer's beats

    assert pair.stands("r1") == ("failed", "cancelled by its scheduler")
    if waits_for_writers(link):
        held = pair.reader.ask("look")
        assert (held["used"], held["quarantined"]) == (BLOCKS, BLOCKS)
        with pytest.raises(PeerFailed, match="no_room"):
            pair.reserve("r2")
    else:
        assert pair.reader.ask("look")["used"] == 0
        pair.reserve("r2")
    pair.writer.signal(signal.SIGCONT)
    pair.writer.ask("finish", transfer="r1.1", index=0, sign="L")

    pair.write("r1", [1, 2], "L")
    with pytest.raises(PeerFailed, match=r"closed|unknown_ticket|LinkBroken"):
        pair.digests("r1")
    pair.writer.ask("close", transfer="r1.1")
    if waits_for_writers(link):
        pair.until_free()
        ticket = pair.reserve("r2")
    else:
        ticket = pair.reserve("r2")  # again: the same
    assert {ref.slot for ref in ticket.slots} == set(range(BLOCKS))
    pair.use(ticket)
    pair.write("r2", range(BLOCKS), "B")
    assert pair.claim("r2", pair.digests("r2")) == ["B"] * BLOCKS
    assert all("L" not in seen for seen in pair.reader.ask("memory"))
    and_then_all_is_well(pair, slots=BLOCKS)


@pytest.mark.parametrize("written", [0, BLOCKS])
def test_a_writer_frozen_between_blocks_is_given_up_and_refused_when_it_thaws(
    pair: Pair, written: int
) -> None:
    pair.open("r1")
    pair.write("r1", range(written), "A")
    digests = pair.digests("r1") if written else ()
    pair.writer.signal(signal.SIGSTOP)
    pair.reader.ask("cancel", transfer="r1.1")

    assert pair.stands("r1") == ("failed", "cancelled by its scheduler")
    pair.writer.signal(signal.SIGCONT)
    if written:
        with pytest.raises(PeerFailed, match="cancelled by its scheduler"):
            pair.claim("r1", digests)
    else:
        pair.write("r1", range(BLOCKS), "A")
        with pytest.raises(PeerFailed, match=r"closed for generation|unknown_ticket"):
            pair.digests("r1")
    pair.writer.ask("close", transfer="r1.1")
    and_then_all_is_well(pair)


@pytest.mark.parametrize("link", ["tcp", pytest.param("nixl/tcp", marks=needs_nixl)])
@pytest.mark.parametrize("written", [0, 1])
def test_a_frozen_reader_fails_the_transfer_and_hears_of_it_when_it_thaws(
    make: Make, written: int
) -> None:
    """Over shared memory a frozen reader is still written to: beats and the hand-over notice it."""
    pair = make(stall_s=2.0)
    pair.open("r1")
    pair.write("r1", range(written), "A")
    until(lambda: pair.writer.ask("look")["unfinished"] == 0)
    pair.reader.signal(signal.SIGSTOP)
    pair.write("r1", range(written, BLOCKS), "A")

    with pytest.raises(PeerFailed, match=r"LinkBroken.*(silent|hung|takes nothing)") as caught:
        pair.digests("r1")
    over = pair.writer.ask("close", transfer="r1.1")

    pair.reader.signal(signal.SIGCONT)
    pair.reader.ask("stopped", transfer="r1.1", reason=caught.value.why, writes=not over)
    state, reason = pair.stands("r1")
    assert state == "failed"
    assert reason.startswith(("failed at its writer: ", f"writer {WRITER} died"))
    until(lambda: bool(pair.writer.ask("close", transfer="r1.1")))
    until(lambda: pair.writer.ask("look")["unfinished"] == 0)
    and_then_all_is_well(pair)


def test_a_hung_peer_is_given_up_within_five_seconds() -> None:
    """By the deadlines in the code: measured times are in `bench/kvfaults.py`."""
    stall_s, most = LinkSettings().stall_s, batching.BATCH_BYTES
    assert stall_s + most / nixl_writer._LEAST_BYTES_PER_S <= 5.0
    assert stall_s <= 3.0  # of silence, over tcp, however much is on its way
    assert tcp_stream.LEAST_BYTES_PER_S > 0
    assert 2 * outgoing.LOOK_S <= 1.0


# Time


def test_a_lease_that_runs_out_in_mid_write_ends_the_transfer_on_both_sides(
    make: Make, link: str
) -> None:
    pair = make(lease_s=1.0, slots=BLOCKS)
    pair.open("r1")
    pair.writer.ask("begin", transfer="r1.1", index=0, sign="L")

    assert pair.until_stands("r1", "expired") == "deadline of state reserved passed"
    pair.write("r1", [1, 2], "L")
    with pytest.raises(PeerFailed, match=r"Expired.*deadline of state"):
        pair.digests("r1")
    pair.writer.ask("finish", transfer="r1.1", index=0, sign="L")
    until(lambda: bool(pair.writer.ask("close", transfer="r1.1")))
    pair.until_free()
    with pytest.raises(PeerFailed, match="has ended: expired"):
        pair.reserve("r1")
    with pytest.raises(PeerFailed, match=r"ticket_expired|UNKNOWN_TICKET|unknown_ticket"):
        pair.claim("r1", ())


# The writer fails


def test_a_writer_that_fails_tells_its_reader_why(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", [0], "A")
    pair.write("r1", [7], "A")  # The engine made a block that nobody asked for.
    with pytest.raises(PeerFailed, match=r"Unverified.*block 7 of 3") as caught:
        pair.digests("r1")

    pair.withdraw("r1", caught.value.why)
    assert pair.stands("r1") == ("failed", f"failed at its writer: {caught.value.why}")
    and_then_all_is_well(pair)


# Payloads


def test_a_bit_flipped_in_memory_is_never_decoded(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", range(BLOCKS), "A")
    digests = pair.digests("r1")
    pair.reader.ask("flip", slot=pair.slots["r1"][1], at=BLOCK_BYTES - 1)

    with pytest.raises(PeerFailed, match="Unverified") as caught:
        pair.claim("r1", digests)

    assert pair.stands("r1") == ("failed", caught.value.why)
    pair.writer.ask("close", transfer="r1.1")
    and_then_all_is_well(pair)


TRUNCATIONS: dict[str, Callable[[tuple[BlockDigest, ...]], tuple[Any, ...]]] = {
    "a block is missing": lambda digests: digests[:-1],
    "a block comes twice": lambda digests: (*digests[:-1], digests[0]),
    "a block is shorter": lambda digests: altered(digests, 1, n_bytes=BLOCK_BYTES - 1),
    "the last is shorter": lambda digests: altered(digests, 2, n_bytes=1),
    "a block is longer": lambda digests: altered(digests, 1, n_bytes=BLOCK_BYTES + 1),
    "nothing": lambda digests: (),
}


@pytest.mark.parametrize("what", TRUNCATIONS)
@pytest.mark.parametrize("link", ["shm", "tcp", pytest.param("nixl/tcp,cma", marks=needs_nixl)])
def test_a_truncated_payload_is_never_decoded(pair: Pair, what: str) -> None:
    pair.open("r1")
    pair.write("r1", range(BLOCKS), "A")
    digests = TRUNCATIONS[what](pair.digests("r1"))

    with pytest.raises(PeerFailed, match="Unverified") as caught:
        pair.claim("r1", digests)

    assert pair.stands("r1") == ("failed", caught.value.why)
    pair.writer.ask("close", transfer="r1.1")
    and_then_all_is_well(pair)


def test_blocks_written_shorter_than_they_are_told_are_never_decoded(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", [0, 1], "A")
    pair.write("r1", [2], "A", n_bytes=BLOCK_BYTES // 2)
    digests = altered(pair.digests("r1"), 2, n_bytes=BLOCK_BYTES)

    with pytest.raises(PeerFailed, match="Unverified"):
        pair.claim("r1", digests)
    assert pair.stands("r1")[0] == "failed"
    pair.writer.ask("close", transfer="r1.1")
    and_then_all_is_well(pair)


# Tickets


def test_a_ticket_counts_once(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", range(BLOCKS), "A")
    digests = pair.digests("r1")
    assert pair.claim("r1", digests) == ["A"] * BLOCKS
    pair.writer.ask("close", transfer="r1.1")

    with pytest.raises(PeerFailed, match="released: imported"):
        pair.claim("r1", digests)
    with pytest.raises(PeerFailed, match="has ended: released: imported"):
        pair.reserve("r1")
    assert pair.stands("r1") == ("released", "imported")
    and_then_all_is_well(pair)


def test_nothing_is_written_under_a_ticket_that_was_used(pair: Pair, link: str) -> None:
    """Its slots are another transfer's by now; who wrote the first one tries."""
    ticket = pair.open("r1", blocks=8)
    pair.write("r1", range(8), "A")
    pair.claim("r1", pair.digests("r1"), blocks=8)
    pair.writer.ask("close", transfer="r1.1")
    pair.until_free()
    pair.open("r2", blocks=8)
    pair.write("r2", range(8), "B")
    digests = pair.digests("r2")

    pair.use(ticket)
    pair.write("r1", range(8), "L")
    with pytest.raises(PeerFailed, match=r"closed for generation|unknown_ticket"):
        pair.digests("r1")

    assert pair.reader.ask("memory") == ["B"] * 8
    assert pair.claim("r2", digests, blocks=8) == ["B"] * 8
    pair.writer.ask("close", transfer="r1.1")
    pair.writer.ask("close", transfer="r2.1")
    and_then_all_is_well(pair)


def test_another_tenants_or_requests_or_writers_job_takes_nothing(pair: Pair) -> None:
    pair.open("r1")
    pair.write("r1", range(BLOCKS), "A")
    digests = pair.digests("r1")
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("ticket_tenant", {"generation": pair.generation("r1", tenant="theirs")}),
        ("ticket_request", {"generation": pair.generation("r7")}),
        ("ticket_request", {"transfer_id": transfer_id(RequestId("r7"), 1)}),
        ("ticket_writer", {"prefill_worker": Incarnation("prefill-worker-x1")}),
        ("ticket_missing", {"seal": None}),
    ]
    for fault, changes in wrong:
        with pytest.raises(PeerFailed, match=fault):
            pair.claim("r1", digests, **changes)
        assert pair.stands("r1")[0] == "reserved"

    assert pair.claim("r1", digests) == ["A"] * BLOCKS  # Its holder may still come.
    pair.writer.ask("close", transfer="r1.1")
    and_then_all_is_well(pair)


# Leaks


def test_nothing_is_left_of_many_transfers_that_failed(pair: Pair, tmp_path: Path) -> None:
    pair.carries("r0", "A")
    pair.until_free()
    before = [peer.ask("look")["descriptors"] for peer in (pair.reader, pair.writer)]
    for number in range(1, 13):
        request = f"r{number}"
        pair.open(request)
        pair.write(request, [0, 1], "A")
        if number % 2:
            pair.withdraw(request, "the engine has failed")
        else:
            pair.reader.ask("cancel", transfer=f"{request}.1")
            until(
                lambda request=request: bool(  # type: ignore[misc]
                    pair.writer.ask("close", transfer=f"{request}.1")
                )
            )
        pair.until_free()
    assert [p.ask("look")["descriptors"] for p in (pair.reader, pair.writer)] == before
    assert (pair.writer.leave(), pair.reader.leave()) == (0, 0)
    assert list(tmp_path.iterdir()) == []

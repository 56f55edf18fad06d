"""KV between two network namespaces over a wire that loses, delays and is cut.

A transfer arrives whole or fails with a reason on both sides; nothing stays held, nothing wrong is
decoded, and when the wire is good again the next one arrives.
"""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych_kvlink.nixl_library import why_absent
from diptych_testkit.kv_pair import Pair, PeerFailed, until
from diptych_testkit.kv_wire import ADDRESSES, DEVICE, Wire, why_not

log = logging.getLogger("tests.kv")
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=f"no bad network here: {why_not()}"),
]
BLOCKS = 8
LINKS = [
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(bool(why_absent()), reason="no NIXL here")),
]
BAD_WEATHER = [(0.0, 0.05), (0.02, 0.0), (0.02, 0.02), (0.1, 0.01)]
"""Shares of packets lost, and seconds one takes one way."""


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture(params=LINKS)
def pair(request: pytest.FixtureRequest, wire: Wire, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(
        request.param,
        tmp_path,
        within=(wire.within(0), wire.within(1)),
        reader={"host": ADDRESSES[0], "nixl_network": "isolated"},
        writer={"nixl_network": "isolated", "directory": str(tmp_path / "elsewhere")},
        environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE},
        slots=8 * BLOCKS,
    )
    yield made
    made.close()


def arrives_or_fails_cleanly(pair: Pair, request: str) -> bool:
    """Send all blocks of a transfer; whether they arrived. Either way nothing is held after it."""
    try:
        pair.open(request, blocks=BLOCKS)
    except PeerFailed as failed:  # As a prefill worker that has no other link.
        pair.reader.ask("stopped", transfer=f"{request}.1", reason=failed.why, writes=False)
        return fails_as_it_may(failed)
    sign = chr(ord("A") + int(request[1:]) % 26)
    pair.write(request, range(BLOCKS), sign)
    try:
        digests = pair.digests(request)
        assert pair.claim(request, digests, blocks=BLOCKS) == [sign] * BLOCKS
    except PeerFailed as failed:
        pair.withdraw(request, failed.why)
        state, reason = pair.stands(request)
        assert state == "failed"
        assert reason
        return fails_as_it_may(failed)
    pair.writer.ask("close", transfer=f"{request}.1")
    return True


def fails_as_it_may(failed: PeerFailed) -> bool:
    assert failed.kind in ("LinkBroken", "Refused", "BadTicket"), failed
    return False


def until_one_arrives(pair: Pair, first: int) -> None:
    """Go on as a fleet does, which tries again, until the network carries KV."""
    numbers = iter(range(first, first + 200))
    until(lambda: arrives_or_fails_cleanly(pair, f"r{next(numbers)}"))
    until(lambda: pair.writer.ask("look")["unfinished"] == 0)
    pair.until_free()


@pytest.mark.parametrize(("loss", "delay_s"), BAD_WEATHER)
def test_bad_weather_costs_transfers_at_most(
    pair: Pair, wire: Wire, loss: float, delay_s: float
) -> None:
    wire.set(loss=loss, delay_s=delay_s)
    arrived = [arrives_or_fails_cleanly(pair, f"r{number}") for number in range(8)]
    log.info("%d of 8 arrived", sum(arrived))
    wire.set()
    until_one_arrives(pair, 100)


@pytest.mark.parametrize("written", [0, 4])
def test_a_cut_wire_fails_what_is_under_way_on_both_sides_and_it_recovers(
    pair: Pair, wire: Wire, written: int
) -> None:
    pair.carries("r1", "A", blocks=BLOCKS)
    pair.open("r2", blocks=BLOCKS)
    pair.write("r2", range(written), "B")
    wire.set(cut=True)
    pair.write("r2", range(written, BLOCKS), "B")

    with pytest.raises(PeerFailed, match="LinkBroken") as caught:
        pair.digests("r2")
    pair.withdraw("r2", caught.value.why)
    state, reason = pair.stands("r2")
    assert state == "failed"
    assert reason
    assert not arrives_or_fails_cleanly(pair, "r3")

    wire.set()
    until_one_arrives(pair, 100)
    assert pair.stands("r2") == (state, reason)


def test_a_pair_that_never_met_meets_when_the_wire_is_whole(pair: Pair, wire: Wire) -> None:
    wire.set(cut=True)
    assert not arrives_or_fails_cleanly(pair, "r1")
    wire.set()
    until_one_arrives(pair, 100)


@pytest.mark.parametrize("who", ["reader", "writer"])
def test_a_peer_that_dies_behind_a_cut_wire_holds_nothing(pair: Pair, wire: Wire, who: str) -> None:
    """No packet tells of its death: deadlines do, and the bus (here: by hand)."""
    pair.open("r1", blocks=BLOCKS)
    wire.set(cut=True)
    if who == "reader":
        pair.write("r1", range(BLOCKS), "A")
        pair.reader.signal(signal.SIGKILL)
        with pytest.raises(PeerFailed, match="LinkBroken"):
            pair.digests("r1")
        wire.set()
        until(lambda: bool(pair.writer.ask("close", transfer="r1.1")))
        until(lambda: pair.writer.ask("look")["unfinished"] == 0)
    else:
        pair.writer.signal(signal.SIGKILL)
        pair.reader.ask("cancel", transfer="r1.1")
        assert pair.stands("r1") == ("failed", "cancelled by its scheduler")
        wire.set()
        pair.until_free()

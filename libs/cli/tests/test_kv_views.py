from typing import Any

import msgspec
import pytest
import rich.console

from diptych_cli import kv, kv_blocks, kv_trace
from diptych_cli.commands import main
from diptych_cli.failing import CliError
from diptych_contracts.control import KvSnapshot, KvStep, KvTransfer
from diptych_contracts.ids import Incarnation, TransferId

P, D = Incarnation("prefill-worker-1"), Incarnation("decode-worker-1")
NOW_MS = 1_800_000_000_000
NAME = TransferId("d4fb4c4e547d70ea34a8b6992499b283.1")


def a_transfer(**facts: Any) -> KvTransfer:
    known = {"transfer_id": NAME, "state": "released", "writer": P, "link": "tcp", "ended_ms": 5}
    return KvTransfer(**(known | facts))


WRITTEN = a_transfer(
    reader=D,
    reason="handed over",
    codec="int8",
    tls=True,
    n_bytes=4_000_000,
    raw_bytes=9_000_000,
    moving_ms=8.0,
    overlap_frac=0.75,
    remainder_ms=5.25,
    steps=(
        KvStep(state="asked", ago_ms=1500.0, reason="tcp"),
        KvStep(state="written", ago_ms=10.0),
        KvStep(state="released", ago_ms=5.0, reason="handed over"),
    ),
)
READ = a_transfer(reason="imported", n_bytes=4_000_000, steps=(KvStep(state="reserved", ago_ms=9),))


def snapshots(*, written: KvTransfer | None, read: KvTransfer | None) -> list[KvSnapshot]:
    return [
        KvSnapshot(worker=P, outgoing=(written,) if written else (), unix_ms=NOW_MS),
        KvSnapshot(worker=D, transfers=(read,) if read else (), unix_ms=NOW_MS),
    ]


def test_the_story_is_told_from_both_sides_with_its_times() -> None:
    text = "\n".join(kv_trace.story(snapshots(written=WRITTEN, read=READ)))

    assert text.startswith(NAME)
    assert f"{P}, its writer: released: handed over" in text
    assert f"{D}, its reader: released: imported" in text
    assert "07:59:58.500  asked     tcp" in text
    assert "4,000,000 bytes over tcp, TLS, int8, 9,000,000 before they were encoded" in text
    assert "moved in 8.0 ms (0.50 GB/s), 75% of it during compute" in text
    assert "taken over 5.2 ms after compute" in text
    assert "both sides agree: handed over" in text


@pytest.mark.parametrize(
    ("written", "read", "says"),
    [
        (WRITTEN, None, f"its reader {D} does not answer, never had it, or has forgotten it"),
        (None, READ, f"its writer {P} does not answer, or has forgotten it"),
        (WRITTEN, a_transfer(ended_ms=0, state="verified"), "under way"),
        (
            a_transfer(state="failed", reason="the link broke", reader=D),
            a_transfer(reason="released by the writer"),
            "both sides agree: not handed over",
        ),
        (
            a_transfer(state="failed", reason="refused: no_room", reader=D),
            a_transfer(state="refused", reason="no_room"),
            "both sides agree: not handed over",
        ),
        (
            a_transfer(state="failed", reason="no answer in 10 s", reader=D),
            READ,
            "the sides differ: its writer says not handed over",
        ),
        (
            WRITTEN,
            a_transfer(state="expired", reason="deadline"),
            "the sides differ: its writer says handed over",
        ),
    ],
)
def test_whether_the_sides_agree_is_told(
    written: KvTransfer | None, read: KvTransfer | None, says: str
) -> None:
    (both,) = kv_trace.sides(snapshots(written=written, read=read)).values()
    assert kv_trace.verdict(both) == says


def test_an_open_transfer_is_told_with_its_deadline() -> None:
    going = a_transfer(ended_ms=0, state="writing", left_ms=71_500, age_ms=100, reader=D)
    lines = list(kv_trace.story(snapshots(written=going, read=None)))
    assert "    ends by itself in 71.5 s" in lines


def test_an_id_is_taken_as_clients_and_logs_show_it() -> None:
    assert kv_trace.plain("chatcmpl-5f0c") == kv_trace.plain("resp_5f0c") == "5f0c"
    with pytest.raises(CliError):
        kv_trace.plain("chatcmpl-")


def test_what_an_older_worker_tells_beside_is_left_out() -> None:
    other = a_transfer(transfer_id=TransferId("77.1"))
    snapshot = KvSnapshot(worker=D, transfers=(READ, other))
    assert kv_trace.only("d4fb", snapshot).transfers == (READ,)


def test_slots_are_told_with_what_holds_them(capsys: pytest.CaptureFixture[str]) -> None:
    held = a_transfer(
        state="reserved", ended_ms=0, age_ms=1500, slots=(4, 5, 6, 9), generations=(2, 2, 2, 1)
    )
    stuck = msgspec.structs.replace(
        held, state="expired", in_quarantine=True, slots=(7,), generations=(3,)
    )
    snapshot = KvSnapshot(
        worker=D,
        slots=160,
        slots_used=5,
        slots_quarantined=1,
        slot_bytes=1_476_080,
        prefix_blocks=12,
        transfers=(held, stuck),
    )
    assert kv_blocks.headline(snapshot) == (
        f"{D}  160 slots of 1,476,080 bytes: 155 free, 4 held, 1 in quarantine; 12 blocks cached"
    )
    assert kv_blocks.row(held, 1_476_080) == (
        "d4fb4c4e.1",
        "reserved",
        "4",
        "4-6 (2), 9 (1)",
        "5,904,320",
        "1.5 s",
        P,
    )
    assert kv_blocks.row(stuck, 1_476_080)[1] == "expired, quarantined"
    rich.console.Console(width=140).print(kv_blocks.table([snapshot]))
    assert "4-6 (2), 9 (1)" in capsys.readouterr().out
    rich.console.Console(width=80).print(kv_blocks.table([snapshot]))
    assert "…" not in capsys.readouterr().out
    assert '"generations":[2,2,2,1]' in kv.json_text([snapshot])


def test_what_a_worker_says_does_not_reach_the_terminal_as_orders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that was broken into could write what its operator reads, or hide it."""
    evil = "\x1b[2J\x1b]0;owned\x07 it\r is fine"
    told = snapshots(
        written=a_transfer(reason=evil, steps=(KvStep(state=evil, ago_ms=1.0, reason=evil),)),
        read=a_transfer(writer=evil, link=evil),
    )

    async def asked(*_: Any) -> list[KvSnapshot]:
        return told

    monkeypatch.setattr(kv_trace, "_asked", asked)
    kv_trace.trace("nats://nowhere", NAME, as_json=False)
    for view in (kv, kv_blocks):
        rich.console.Console(width=200).print(view.table(told))
    text = capsys.readouterr().out
    assert "it? is fine" in text
    assert not set(text) & set("\x1b\x07\r")


def test_many_runs_of_slots_are_cut_short() -> None:
    told = kv_blocks.which(tuple(range(0, 40, 2)), (1,) * 20)
    assert told.startswith("0 (1), 2 (1), ")
    assert told.endswith(", and 8 more")
    assert kv_blocks.which((), ()) == ""


def test_both_directions_are_rows() -> None:
    assert kv.row(WRITTEN)[2] == f"to {D}"
    assert kv.row(READ)[2] == f"from {P}"


@pytest.mark.parametrize("verb", ["transfers", "blocks", "trace"])
def test_each_view_teaches_by_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["kv", verb, "--help"])
    assert ended.value.code == 0
    assert "diptych kv" in capsys.readouterr().out


def test_what_stands_before_the_view_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(nats_url: str, *, as_json: bool) -> int:
        seen.append((nats_url, as_json))
        return 0

    monkeypatch.setattr(kv_blocks, "blocks", note)
    assert main(["kv", "--nats-url", "nats://a:1", "--json", "blocks"]) == 0
    assert main(["kv", "blocks", "--nats-url", "nats://b:2"]) == 0
    assert seen == [("nats://a:1", True), ("nats://b:2", False)]

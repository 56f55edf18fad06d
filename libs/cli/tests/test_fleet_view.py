from typing import Any

import pytest
import rich.console

from diptych_bus.port import Gone, Kept
from diptych_cli import kv, top
from diptych_cli.fleet_view import FleetView, Seen
from diptych_cli.presence import StackFile
from diptych_cli.tables import console
from diptych_contracts.control import KvSnapshot, KvTransfer
from diptych_contracts.fleet import Beat, WorkerLoad
from diptych_contracts.ids import Incarnation, RequestId, TransferId
from diptych_contracts.journal import End, EndReason, TokenEntry, TokenFrame
from diptych_contracts.requests import RecordState, RequestRecord

WORKER = Incarnation("decode-worker-1")
STACK = StackFile(
    supervisor=Incarnation("s"), pid=1, port=1, base_url="http://[::1]:1/v1", nats_url="", model="m"
)


def beat(member: str, service: str, *, ready: bool = True, detail: str = "") -> Beat:
    return Beat(member=Incarnation(member), service=service, count=1, ready=ready, detail=detail)


def load(**changes: Any) -> WorkerLoad:
    return WorkerLoad(worker=WORKER, **changes)


def frame(n_tokens: int) -> TokenFrame:
    entry = TokenEntry(request_id=RequestId("r"), attempt=1, index=0, token_ids=(1,) * n_tokens)
    return TokenFrame(worker=WORKER, entries=(entry,))


def record(request: str, state: RecordState, end: EndReason | None = None) -> Kept[RequestRecord]:
    request_id = RequestId(request)
    value = RequestRecord(
        request_id=request_id,
        owner=Incarnation("s"),
        gateway=Incarnation("g"),
        state=state,
        end=End(request_id=request_id, attempt=1, reason=end) if end else None,
    )
    return Kept(request, value, 1)


def printed(renderable: Any) -> str:
    shown = console()
    with shown.capture() as captured:
        shown.print(renderable)
    return str(captured.get())


def seen(view: FleetView, now_s: float) -> list[Seen]:
    return list(view.members(now_s))


def test_members_stand_service_by_service() -> None:
    view = FleetView(0.0)
    for member, service in (("w", "decode-worker"), ("x", "other"), ("g", "gateway")):
        view.beat(beat(member, service), 0.0)
    assert [s.beat.member for s in seen(view, 0.1)] == ["g", "w", "x"]


def test_silence_is_told_and_then_forgotten() -> None:
    view = FleetView(0.0)
    view.beat(beat("g", "gateway"), 0.0)
    (member,) = seen(view, 0.5)
    assert top.state(member, 0.5) == "ready"
    assert top.state(member, 4.0) == "silent for 4 s"
    assert seen(view, 11.0) == []


def test_who_is_not_ready_says_why() -> None:
    member = Seen(beat("g", "gateway", ready=False, detail="draining"), 0.0)
    assert top.state(member, 0.1) == "draining"


def test_speed_is_what_came_in_the_last_seconds() -> None:
    view = FleetView(0.0)
    view.beat(beat(WORKER, "decode-worker"), 0.0)
    view.tokens(frame(30), 1.0)
    view.tokens(frame(60), 4.0)
    (member,) = seen(view, 5.0)
    assert member.tokens_per_s(5.0, 0.0) == 20.0
    assert member.tokens_per_s(9.0, 0.0) == 0.0


def test_speed_of_the_first_second_is_not_diluted() -> None:
    view = FleetView(0.0)
    view.beat(beat(WORKER, "decode-worker"), 0.0)
    view.tokens(frame(10), 0.5)
    (member,) = seen(view, 1.0)
    assert member.tokens_per_s(1.0, 0.0) == 10.0


def test_requests_count_by_state_and_by_end() -> None:
    view = FleetView(0.0)
    view.recorded(record("a", RecordState.QUEUED))
    view.recorded(record("b", RecordState.ROUTED))
    view.recorded(record("b", RecordState.CLOSED, EndReason.STOP))
    view.recorded(record("c", RecordState.ROUTED))
    view.recorded(Gone("c"))
    assert view.requests() == {"queued": 1, "stop": 1}
    assert top.requests_line(view).startswith("requests: 1 queued, 0 routed")
    assert "1 stop, 0 length" in top.requests_line(view)


def test_the_picture_holds_everybody() -> None:
    view = FleetView(0.0)
    view.beat(beat("gateway-1", "gateway"), 0.0)
    view.beat(beat(WORKER, "decode-worker"), 0.0)
    view.load(load(running=2, waiting=1, kv_tokens_used=512, power_w=61.7, cap_w=300.0))
    text = printed(top.picture(STACK, view, 0.1, connected=False))
    assert "m at http://[::1]:1/v1 (the stack's bus does not answer)" in text
    (row,) = (line for line in text.splitlines() if WORKER in line)
    assert row.split() == [WORKER, "ready", "2", "1", "512", "0.0", "62/300", "W", "0", "J", "sim"]


def test_transfers_are_rows_under_their_worker() -> None:
    going = KvTransfer(
        transfer_id=TransferId("r.1"),
        state="reserved",
        writer="prefill-worker-1",
        link="tcp",
        age_ms=1500,
        left_ms=73_500,
        n_bytes=2_952_160,
    )
    over = KvTransfer(
        transfer_id=TransferId("q.1"),
        state="failed",
        writer="x",
        link="shm",
        n_bytes=70_000,
        reason="writer x died",
    )
    snapshot = KvSnapshot(worker=WORKER, slots=160, slots_used=2, transfers=(going, over))
    text = printed(kv.table([snapshot]))
    assert "2 of 160 slots in use" in text
    assert "1.5 s" in text
    assert "73.5 s" in text
    assert "tcp" in text
    assert "2,952,160" in text
    assert "writer x died" in text
    assert kv.row(over)[2:7] == ("from x", "shm", "", "", "70,000")
    assert '"transfer_id":"r.1"' in kv.json_text([snapshot])


def test_no_column_of_transfers_is_lost_in_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    going = KvTransfer(
        transfer_id=TransferId("d4fb4c4e547d70ea34a8b6992499b283.1"),
        state="reserved",
        writer="prefill-worker-93b9115df818",
        link="shm",
        age_ms=120_500,
        left_ms=9_000,
        n_bytes=623_156_000,
        reason="",
    )
    over = KvTransfer(
        transfer_id=TransferId("77fb4c4e547d70ea34a8b6992499b283.2"),
        state="released",
        writer="prefill-worker-93b9115df818",
        link="tcp",
        n_bytes=623_156,
        reason="writer prefill-worker-93b9115df818 died",
    )
    table = kv.table([KvSnapshot(worker=WORKER, slots=160, transfers=(going, over))])
    rich.console.Console(width=80).print(table)
    text = capsys.readouterr().out
    for shown in ("d4fb4c4e.1", "reserved", "shm", "120.5 s", "9.0 s", "623,156,000", "77fb4c4e.2"):
        assert shown in text
    folded = "".join(text.split())
    assert "…" not in text
    assert "why" in folded
    assert "died" in folded
    assert all(len(line) <= 80 for line in text.splitlines())

import base64
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from diptych_cli import tap
from diptych_contracts.dead import DeadLetter
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import GenerateJob
from diptych_contracts.journal import TokenEntry, TokenFrame
from diptych_contracts.wire import Message, encode
from diptych_testkit.builders import a_generation, a_request, an_end, tokens

NOW = datetime(2026, 5, 4, 3, 2, 1, 12000, tzinfo=UTC)
FRAME = TokenFrame(
    worker="w",  # type: ignore[arg-type]
    entries=(
        TokenEntry(request_id="r", attempt=1, index=0, token_ids=(5, 6, 7)),  # type: ignore[arg-type]
    ),
)


def tapped(data: bytes, *, everything: bool = False) -> Any:
    return json.loads(tap.line("live.g", data, everything=everything, now=NOW))


def test_a_message_is_one_line_with_its_type_and_without_its_token_ids() -> None:
    data = encode(FRAME)
    assert tapped(data) == {
        "time": "2026-05-04T03:02:01.012+00:00",
        "subject": "live.g",
        "size": len(data),
        "type": "token_frame.1",
        "message": {
            "worker": "w",
            "entries": [
                {
                    "type": "token_entry.1",
                    "request_id": "r",
                    "attempt": 1,
                    "index": 0,
                    "token_ids": "<3 ids>",
                }
            ],
        },
    }


def test_everything_is_shown_if_asked_for() -> None:
    assert tapped(encode(FRAME), everything=True)["message"]["entries"][0]["token_ids"] == [5, 6, 7]


@pytest.mark.parametrize("everything", [False, True])
def test_what_would_let_its_reader_speak_is_never_shown(everything: bool) -> None:
    """Nor in the job that carries a voice; everything is less than that."""
    voice, secret = b"v" * 16, b"s" * 16
    job = GenerateJob(generation=a_generation(voice=voice))
    frame = TokenFrame(worker=Incarnation("w"), entries=(tokens(5),), ends=(an_end(),))
    spoken = msgspec.structs.replace(
        frame,
        entries=(msgspec.structs.replace(frame.entries[0], voice=voice),),
        ends=(msgspec.structs.replace(frame.ends[0], voice=voice),),
    )
    for message in (job, spoken, a_request(secret=secret)):
        line = tap.line("x", encode(message), everything=everything)
        assert "<hidden>" in line
        for hidden in (voice, secret):
            assert hidden.decode() not in line
            assert base64.b64encode(hidden).decode() not in line


@pytest.mark.parametrize(("everything", "shown"), [(False, "<2 bytes>"), (True, "AP8=")])
def test_bytes_are_counted_or_shown(everything: bool, shown: str) -> None:
    dead: Message = DeadLetter(subject="s", reason="r", payload=b"\x00\xff")
    assert tapped(encode(dead), everything=everything)["message"]["payload"] == shown


@pytest.mark.parametrize(
    ("data", "raw"),
    [(b"", ""), (b'{"seq": 1}', '{"seq": 1}'), (b"\xc1\xff", "wf8="), (b"\x07", "\x07")],
)
def test_what_is_no_message_is_shown_as_it_is(data: bytes, raw: str) -> None:
    shown = tapped(data)
    assert (shown["type"], shown["raw"], "message" in shown) == ("", raw, False)


@pytest.mark.parametrize(
    ("subject", "reply", "left_out"),
    [
        ("beat.w", "", True),
        ("queue.scheduler-1", "", True),
        ("$KV.leases.governor", "_INBOX.a", True),
        ("$KV.workers.decode-worker-1", "_INBOX.a", True),
        ("live.g", "", True),
        ("_INBOX.x", "", True),
        ("request.interactive.m", "_INBOX.a", False),
        ("request.interactive.m", "$JS.ACK.REQUESTS.sched.1.1.1.1.0", True),
        ("$KV.requests.r", "", False),
    ],
)
def test_telemetry_and_copies_are_left_out(subject: str, reply: str, left_out: bool) -> None:
    assert tap.is_chatter(subject, reply) is left_out


def test_chunks_of_objects_are_counted() -> None:
    subject, data = "$O.prompts.C.0123", b'{"type": "what somebody wrote"}'
    shown = json.loads(tap.line(subject, data, everything=False))
    assert (shown["raw"], "message" in shown) == ("<31 bytes>", False)
    assert "wrote" in tap.line(subject, data, everything=True)
    assert "name" in tap.line("$O.prompts.M.cjE=", b'{"name":"r1"}', everything=False)

import io
import json

from diptych_cli.merged_log import MergedLog


def line(level: str, event: str, **values: object) -> bytes:
    stamp = "2030-01-02T03:04:05.678901Z"
    return json.dumps({"ts": stamp, "level": level, "event": event, **values}).encode()


def log(level: str = "warning", colour: bool = False) -> tuple[MergedLog, io.StringIO]:
    out = io.StringIO()
    made = MergedLog(out, level=level, colour=colour)
    made.expect(["gateway", "nats"])
    return made, out


def test_quiet_shows_what_matters() -> None:
    merged, out = log()
    merged.line("gateway", line("info", "request_accepted"))
    merged.line("gateway", line("warning", "bus_away", service="gateway", wait_ms=3))
    assert out.getvalue() == "gateway | 03:04:05.678 warning bus_away wait_ms=3\n"


def test_verbose_shows_the_rest() -> None:
    merged, out = log(level="info")
    merged.line("gateway", line("info", "request_accepted"))
    merged.line("gateway", line("debug", "step"))
    assert out.getvalue().count("\n") == 1


def test_names_are_aligned() -> None:
    merged, out = log()
    merged.say("nats", "ready after 0.1 s")
    assert out.getvalue() == "nats    | ready after 0.1 s\n"


def test_a_traceback_keeps_its_prefix() -> None:
    merged, out = log()
    merged.line("gateway", line("error", "service_failed", exception="Traceback\n  boom"))
    assert [text[:9] for text in out.getvalue().splitlines()] == ["gateway |"] * 3


def test_the_last_words_of_a_process_are_kept_and_told_once() -> None:
    merged, out = log()
    merged.line("gateway", b"gateway: DIPTYCH_GATEWAY__PROT is no setting\n")
    assert out.getvalue() == ""
    merged.show_tail("gateway")
    merged.show_tail("gateway")
    assert out.getvalue() == "gateway | gateway: DIPTYCH_GATEWAY__PROT is no setting\n"


def test_the_marks_of_nats_server_are_understood() -> None:
    merged, out = log()
    merged.line("nats", b"[7] 2030/01/02 03:04:05 [INF] Server is ready")
    merged.line("nats", b"[7] 2030/01/02 03:04:05 [WRN] slow consumer")
    assert out.getvalue() == "nats    | [7] 2030/01/02 03:04:05 [WRN] slow consumer\n"


def test_odd_lines_do_no_harm() -> None:
    merged, out = log(level="debug")
    for raw in (b'{"event": 1', b"\xff\xfe", b"", b"[1, 2]", b'{"level": "odd", "event": "x"}'):
        merged.line("gateway", raw)
    assert len(out.getvalue().splitlines()) == 4


def test_colours_are_for_terminals() -> None:
    merged, out = log(colour=True)
    merged.line("gateway", line("error", "broken"))
    assert out.getvalue().startswith("\x1b[36mgateway |\x1b[0m \x1b[31m")


def test_what_nats_warns_of_and_is_meant_is_not_shown() -> None:
    out = io.StringIO()
    log = MergedLog(out)
    log.line(
        "nats",
        b'[1] [WRN] Clients that are not using "TLS Handshake First" option will fail to connect',
    )
    assert out.getvalue() == ""

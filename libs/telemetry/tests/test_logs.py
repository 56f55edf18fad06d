import json
import logging
import warnings

import pytest

from diptych_telemetry import context, logger, logs, recorded_spans, tracer


def configure(*, level: str = "info", text: bool = False) -> None:
    logs.configure(level=level, text=text, identity={"service": "gateway", "incarnation": "gw-1"})


def lines(captured: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in captured.readouterr().err.splitlines()]


def test_a_line_says_when_who_and_what(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logger("room").info("prefill_dispatched", request_id="r1", queue_ms=3.1)
    (line,) = lines(capsys)
    assert list(line)[:3] == ["ts", "level", "event"]
    assert str(line.pop("ts")).endswith("Z")
    assert line == {
        "level": "info",
        "event": "prefill_dispatched",
        "service": "gateway",
        "incarnation": "gw-1",
        "module": "room",
        "request_id": "r1",
        "queue_ms": 3.1,
    }


def test_a_lower_level_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="warning")
    logger("room").info("unheard")
    assert lines(capsys) == []


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of debug, info, warning, error, got 'loud'"):
        configure(level="loud")


def test_context_is_bound_inside_the_with_only(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    with context(request_id="r1"):
        logger("room").info("inside")
    logger("room").info("outside")
    inside, outside = lines(capsys)
    assert inside["request_id"] == "r1"
    assert "request_id" not in outside


def test_a_line_inside_a_span_carries_its_trace_id(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    with recorded_spans(), tracer("room").start_as_current_span("gateway.accept") as span:
        logger("room").info("inside")
    (line,) = lines(capsys)
    assert line["trace_id"] == f"{span.get_span_context().trace_id:032x}"


@pytest.mark.parametrize("key", sorted(logs.PRIVATE))
def test_what_a_user_wrote_is_hidden(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logger("room").info("leaky", **{key: "my secret"})
    (line,) = lines(capsys)
    assert line[key] == "<private>"


def test_a_traceback_stays_in_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    try:
        raise RuntimeError(what := "xylo" + "phone")
    except RuntimeError:
        logger("room").exception("service_failed")
    (line,) = lines(capsys)
    assert line["level"] == "error"
    assert "test_logs.py" in str(line["exception"])
    assert "RuntimeError" in str(line["exception"])
    assert what not in str(line["exception"])  # a message may repeat what somebody wrote


def test_a_task_that_nobody_waits_for_shows_nothing_of_its_exception(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure()
    error = KeyError("xylophone")
    told = f"Task exception was never retrieved\nfuture: <Task exception={error!r}>"
    logging.getLogger("asyncio").error(told, exc_info=error)
    (line,) = lines(capsys)
    assert line["message"] == "Task exception was never retrieved"
    assert "xylophone" not in json.dumps(line)


def test_text_reads_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure(text=True)
    logger("room").warning("bus_away", url="nats://x", detail="not there")
    line = capsys.readouterr().err.rstrip("\n")
    assert line.endswith("warning bus_away url=nats://x detail='not there'")
    assert "gw-1" not in line


def test_a_library_warning_becomes_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    logging.getLogger("some.library").warning("odd %s", "thing")
    logging.getLogger("some.library").info("chatter")
    (line,) = lines(capsys)
    assert (line["event"], line["module"], line["message"]) == (
        "library_said",
        "some.library",
        "odd thing",
    )


def test_a_python_warning_becomes_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure()
        warnings.warn("old way", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    (line,) = lines(capsys)
    assert "old way" in str(line["message"])


def test_configuring_again_replaces_and_does_not_double(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure()
    configure(level="error")
    logging.getLogger("some.library").error("once")
    assert len(lines(capsys)) == 1

import dataclasses
import hashlib
import socket
from pathlib import Path

import pytest

from diptych_cli import catalogue, checks, doctor
from diptych_cli.checks import Finding, Grade

DEFAULT = catalogue.KNOWN[catalogue.DEFAULT]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_absent_weights_are_a_note_since_up_fetches_them() -> None:
    finding = checks.weights()
    assert finding.grade is Grade.NOTE
    assert "diptych models pull smollm2-135m" in finding.advice


def test_damaged_weights_are_told() -> None:
    DEFAULT.path.parent.mkdir(parents=True)
    DEFAULT.path.write_bytes(b"damaged")
    finding = checks.weights()
    assert (finding.grade, finding.found) == (Grade.MISSING, f"{DEFAULT.path} is damaged")


def test_whole_weights_are_fine() -> None:
    DEFAULT.path.parent.mkdir(parents=True)
    DEFAULT.path.write_bytes(b"whole")
    model = dataclasses.replace(DEFAULT, sha256=hashlib.sha256(b"whole").hexdigest())
    assert checks.weights(model) == Finding(
        Grade.FINE, "weights of smollm2-135m", str(DEFAULT.path)
    )


def test_a_taken_port_is_missing() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert checks.port_free(other.getsockname()[1]).grade is Grade.MISSING


def test_no_shared_memory_is_told(tmp_path: Path) -> None:
    finding = checks.shared_memory(tmp_path / "nowhere")
    assert finding.grade is Grade.MISSING
    assert "mount a tmpfs" in finding.advice


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_meminfo", lambda _: 500_000_000)
    finding = checks.memory()
    assert (finding.grade, finding.found) == (Grade.MISSING, "0.5 GB free, 1.5 GB needed")


def test_this_machine_has_the_server_and_the_library() -> None:
    assert checks.nats_server().grade is Grade.FINE
    assert checks.llama_library().grade is Grade.FINE
    assert checks.processor().found.split()[1] == "cores,"


@pytest.mark.parametrize(
    ("grade", "code", "last"),
    [
        (Grade.FINE, 0, "Ready: diptych up"),
        (Grade.NOTE, 0, "Ready: diptych up"),
        (Grade.MISSING, 1, "1 missing"),
    ],
)
def test_only_what_is_missing_fails(
    grade: Grade,
    code: int,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = Finding(grade, "thing", "found it so", "do this")
    monkeypatch.setattr(checks, "everything", lambda _port: iter([finding]))
    assert doctor.doctor(8080) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{grade.value} thing: found it so"
    assert lines[1] == "    do this"
    assert lines[-1] == last

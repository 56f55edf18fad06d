"""`diptych settings`: nothing that can be set is left untold."""

import re
from pathlib import Path

import pytest

from diptych_cli import commands
from diptych_testkit.ports import free_port

SERVICES = ("gateway", "scheduler", "prefill-worker", "decode-worker", "power-governor")


def test_every_setting_of_every_service_is_told_with_default_and_meaning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert commands.main(["settings"]) == 0
    text = capfd.readouterr().out
    told = re.findall(r"^(DIPTYCH_\w+)\n    (.+); (default: .+|must be set)\n(.*)$", text, re.M)
    assert len(told) == len(re.findall(r"^DIPTYCH_\w+$", text, re.M)) > 100
    assert [name for name, _, _, meaning in told if not meaning.startswith("    ")] == []
    for service in SERVICES:
        assert f"Settings of the {service}: " in text


def test_one_service_can_be_asked_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["settings", "gateway"]) == 0
    text = capfd.readouterr().out
    assert "DIPTYCH_GATEWAY__MAX_IN_FLIGHT\n    a whole number; default: 256\n" in text
    assert "SCHEDULER" not in text


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DIPTYCH_GATEWAY__MAX_INFLIGHT", "3", "is no setting; after DIPTYCH_GATEWAY__ is known:"),
        ("DIPTYCH_GATEWAY__MAX_IN_FLIGHT", "many", "expected a whole number, got 'many'"),
        ("DIPTYCH_GATWAY__MAX_IN_FLIGHT", "3", "is of no service; known: DIPTYCH_ALL__, "),
        ("DIPTYCH_DECODE_WORKER__KV_TIERS", "disk:20", "disk:20"),
    ],
)
def test_a_wrong_setting_stops_the_stack_before_anything_is_started(
    variable: str,
    value: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    store = tmp_path / "stack"
    told = ["up", "--port", str(free_port()), "--dir", str(store), "--model", str(tmp_path / "m")]
    assert commands.main(told) == 1
    assert says in capsys.readouterr().err
    assert not store.exists()

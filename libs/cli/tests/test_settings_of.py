"""`diptych settings`: nothing that can be set is left untold."""

import re

import pytest

from diptych_cli import commands

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

import subprocess
import sys
from pathlib import Path

import pytest

from diptych_cli import presence
from diptych_cli.failing import CliError
from diptych_contracts.ids import Incarnation


def stack(port: int = 8080) -> presence.StackFile:
    return presence.StackFile(
        supervisor=Incarnation("supervisor-1"),
        pid=7,
        port=port,
        base_url=f"http://127.0.0.1:{port}/v1",
        nats_url="nats://127.0.0.1:1",
        model="m",
    )


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "diptych"


def test_a_stack_is_found_while_it_runs(state: Path) -> None:
    with presence.claimed(state / "8080", stack()):
        assert presence.find() == presence.find(8080) == presence.find(None, state / "8080")
    with pytest.raises(CliError, match="no stack runs here; start one: diptych up"):
        presence.find()


def test_among_several_one_is_chosen_by_its_port(state: Path) -> None:
    with presence.claimed(state / "1", stack(1)), presence.claimed(state / "2", stack(2)):
        assert presence.find(2) == stack(2)
        with pytest.raises(CliError, match="2 stacks run here, on ports 1, 2: choose one"):
            presence.find()


def test_a_folder_of_its_own_is_found_by_name(tmp_path: Path) -> None:
    with presence.claimed(tmp_path / "mine", stack()):
        assert presence.find(None, tmp_path / "mine") == stack()
        with pytest.raises(CliError, match=r"no stack runs on port 8080.*the same --dir"):
            presence.find(8080)


def test_a_folder_has_one_stack(tmp_path: Path) -> None:
    with (
        presence.claimed(tmp_path, stack()),
        pytest.raises(CliError, match=r"belongs to the stack on port 8080 \(process 7\)"),
        presence.claimed(tmp_path, stack(9000)),
    ):
        raise AssertionError


def test_what_a_killed_stack_left_is_no_stack(state: Path) -> None:
    script = f"""
import os
from pathlib import Path
from diptych_cli import presence
with presence.claimed(Path({str(state / "8080")!r}), presence.StackFile(
    supervisor="s", pid=1, port=8080, base_url="", nats_url="", model="m")):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert (state / "8080" / presence.FILE).stat().st_size > 0
    with pytest.raises(CliError):
        presence.find(8080)
    with presence.claimed(state / "8080", stack()):
        assert presence.find() == stack()

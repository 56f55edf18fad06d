import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diptych_testkit import ports
from diptych_testkit.ports import free_port

TAKE = """
import sys
from pathlib import Path
from diptych_testkit import ports
ports._PORTS = range(20_000, 20_600)
print(*(ports.free_port(Path(sys.argv[1])) for _ in range(50)))
"""


def test_a_free_port_can_be_had_and_is_none_that_the_kernel_gives_to_clients() -> None:
    port = free_port()
    assert 10_000 <= port < 32_000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))


def test_a_port_is_given_once_also_to_other_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKE, str(tmp_path / "book")]
    takers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    given = [int(port) for taker in takers for port in taker.communicate(timeout=120)[0].split()]
    assert len(given) == len(set(given)) == 200


def test_a_port_is_given_again_when_nobody_remembers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_PORTS", range(20_700, 20_701))
    monkeypatch.setattr(ports, "_unused", lambda _: True)
    assert free_port(tmp_path / "book") == 20_700
    monkeypatch.setattr(ports, "GIVEN_S", 0)
    assert free_port(tmp_path / "book") == 20_700


def test_a_port_that_somebody_listens_on_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listening:
        assert not ports._unused(listening.getsockname()[1])


def test_where_every_port_was_given_lately_one_is_given_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_PORTS", range(20_700, 20_703))
    monkeypatch.setattr(ports, "_unused", lambda _: True)
    assert {free_port(tmp_path / "book") for _ in range(50)} == {20_700, 20_701, 20_702}

"""A real nats-server for a test, on a free port with a store of its own.

In a test module's or folder's `conftest.py`:

    @pytest.fixture(scope="module")
    def nats_server(tmp_path_factory):
        with running_nats(tmp_path_factory.mktemp("nats")) as server:
            yield server
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from diptych_bus.server import CONFIG_NAME, HOST, NatsServer, command, config_text, read_port
from diptych_testkit.ports import free_port

_FORMED_S = 120.0


@contextmanager
def running_nats(store: Path) -> Iterator[NatsServer]:
    """A started server; it is gone afterwards, whatever the test did to it.

    Its port is none that the kernel gives: clients of a server that is gone, of this test or of
    another on this machine, knock for a while at the port that they know.
    """
    server = NatsServer(store, port=free_port())
    server.start_blocking()
    try:
        yield server
    finally:
        server.stop_blocking()


@dataclass(slots=True)
class NatsCluster:
    """Servers that keep each other's streams, on this machine."""

    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def kill(self, number: int) -> None:
        """SIGKILL one of them."""
        self.processes[number].kill()
        self.processes[number].wait()


@contextmanager
def running_cluster(store: Path, *, servers: int = 3) -> Iterator[NatsCluster]:
    """A cluster of `servers`; gone afterwards."""
    cluster = NatsCluster()
    with ExitStack() as held:
        routes = [free_port() for _ in range(servers)]
        for number, route in enumerate(routes):
            folder = store / f"n{number}"
            folder.mkdir(parents=True)
            text = _clustered(folder, number, route, routes)
            (folder / CONFIG_NAME).write_text(text)
            log = held.enter_context((folder / "log").open("wb"))
            process = subprocess.Popen(command(folder / CONFIG_NAME), stdout=log, stderr=log)
            cluster.processes.append(process)
        try:
            for number, process in enumerate(cluster.processes):
                cluster.urls.append(_url(store / f"n{number}", process.pid))
            yield cluster
        finally:
            for process in cluster.processes:
                process.kill()
                process.wait()


def _clustered(folder: Path, number: int, route: int, routes: list[int]) -> str:
    others = ", ".join(f'"nats-route://{HOST}:{other}"' for other in routes)
    return config_text(folder) + (
        f"server_name: n{number}\n"
        f"cluster {{ name: test, host: {HOST}, port: {route}, routes: [{others}] }}\n"
    )


def _url(folder: Path, pid: int) -> str:
    give_up_s = time.monotonic() + _FORMED_S
    while (port := read_port(folder, pid)) is None:
        if time.monotonic() > give_up_s:
            raise AssertionError(f"no server in {folder}: {(folder / 'log').read_text()[-1000:]}")
        time.sleep(0.02)
    return f"nats://{HOST}:{port}"

"""A real nats-server for a test, on a free port with a store of its own.

In a test module's or folder's `conftest.py`:

    @pytest.fixture(scope="module")
    def nats_server(tmp_path_factory):
        with running_nats(tmp_path_factory.mktemp("nats")) as server:
            yield server
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych_bus.server import NatsServer


@contextmanager
def running_nats(store: Path) -> Iterator[NatsServer]:
    """A started server; it is gone afterwards, whatever the test did to it."""
    server = NatsServer(store)
    server.start_blocking()
    try:
        yield server
    finally:
        server.stop_blocking()

from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych_testkit.live_stack import LiveStack
from diptych_testkit.markers import leaks


@pytest.fixture(scope="session", autouse=True)
def _nothing_leaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the last test the logs of all stacks are searched for what tests mark as secret."""
    yield
    found = [f"{path.name}: {line}" for path, line in leaks(tmp_path_factory.getbasetemp())]
    assert not found, found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """One of each service, shared by a module; its tests must leave it whole."""
    live = LiveStack(tmp_path_factory.mktemp("stack"), patient=True)
    try:
        live.start_all()
        yield live
    finally:
        live.close()


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[LiveStack]:
    """An empty stack of the test's own, to be broken at will."""
    live = LiveStack(tmp_path, patient=True)
    try:
        yield live
    finally:
        live.close()

"""One real server for all tests of the adapter."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych_testkit.triton_models.repository import Model
from diptych_testkit.triton_server import Installation, TritonServer

HERE = Path(__file__).parent
STEP_S = 0.005


@pytest.fixture(scope="session")
def installation() -> Installation:
    found = Installation(HERE)
    found.install()
    return found


@pytest.fixture(scope="session")
def server(
    installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Simulated models: a context, a generation, and one of the LLM API."""
    folder = tmp_path_factory.mktemp("triton")
    server = TritonServer(folder, installation, transceiver=folder / "kv")
    server.start(
        [
            Model(name="context", step_s=STEP_S),
            Model(name="generation", step_s=STEP_S),
            Model(name="text", llm_api=True, step_s=STEP_S),
            Model(name="reusing", parameters={"enable_kv_cache_reuse": "true"}),
        ]
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()

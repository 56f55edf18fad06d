"""Stacks that outside clients talk to: each is started once, by the first who asks for it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych_testkit.live_stack import LiveStack, Process, free_port
from diptych_testkit.outside_clients import OutsideClients


@pytest.fixture(scope="session")
def outside() -> OutsideClients:
    """Clients of other makers."""
    found = OutsideClients(Path(__file__).parent)
    assert found.installed, "run `make clients`, which installs them first"
    return found


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """One of each service on the default model; tests leave it whole."""
    live = LiveStack(tmp_path_factory.mktemp("stack"), patient=True)
    try:
        live.start_all()
        yield live
    finally:
        live.close()


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """One of each service on an engine that computes nothing; tests leave it whole."""
    live = LiveStack(tmp_path_factory.mktemp("sim"), engine="sim", patient=True)
    try:
        live.start_all({"MAX_SEQUENCES": "64", "KV_TOKENS": "400000", "TRANSFER_SLOTS": "1024"})
        yield live
    finally:
        live.close()


@pytest.fixture(scope="session")
def client(stack: LiveStack) -> Iterator[openai.OpenAI]:
    """The stock client on the default model."""
    with openai.OpenAI(base_url=stack.base_url, api_key="none", timeout=240) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Gateway:
    """One more gateway, on a port of its own."""

    process: Process
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        """A stock client that repeats nothing unless told to."""
        options = {"max_retries": 0, "timeout": 240, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **options)


@pytest.fixture
def one_more_gateway(stack: LiveStack) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways with settings of their own on the shared stack."""
    started: list[Process] = []

    def start(**settings: str) -> Gateway:
        port = free_port()
        process = stack.start("gateway", PORT=str(port), **settings)
        started.append(process)
        process.wait_ready()
        return Gateway(process, f"http://127.0.0.1:{port}")

    try:
        yield start
    finally:
        for process in started:
            process.stop()

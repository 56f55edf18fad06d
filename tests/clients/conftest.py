"""Stacks that outside clients talk to: each is started once, by the first who asks for it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from diptych_testkit.live_stack import LiveStack
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
    live = LiveStack(tmp_path_factory.mktemp("stack"))
    try:
        live.start_all()
        yield live
    finally:
        live.close()


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """One of each service on an engine that computes nothing; tests leave it whole."""
    live = LiveStack(tmp_path_factory.mktemp("sim"), engine="sim")
    try:
        live.start_all({"MAX_SEQUENCES": "64", "KV_TOKENS": "400000", "TRANSFER_SLOTS": "1024"})
        yield live
    finally:
        live.close()


@pytest.fixture(scope="session")
def client(stack: LiveStack) -> Iterator[openai.OpenAI]:
    """The stock client on the default model."""
    with openai.OpenAI(base_url=stack.base_url, api_key="none", timeout=60) as made:
        yield made

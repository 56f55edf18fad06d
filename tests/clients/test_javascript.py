"""JavaScript clients on the default model; each script is a suite of Node's own test runner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.outside_clients import OutsideClients

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("script", ["openai.test.mjs", "ai.test.mjs", "answers.test.mjs"])
def test_a_suite_passes(
    outside: OutsideClients, stack: LiveStack, tmp_path: Path, script: str
) -> None:
    outside.run_node(script, tmp_path, DIPTYCH_URL=stack.base_url, DIPTYCH_MODEL=MODEL)


def test_retries_wait_as_they_are_told(
    outside: OutsideClients, one_more_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    gateway = one_more_gateway(MAX_IN_FLIGHT="1")
    url = f"{gateway.url}/v1"
    outside.run_node("errors.test.mjs", tmp_path, DIPTYCH_URL=url, DIPTYCH_MODEL=MODEL)

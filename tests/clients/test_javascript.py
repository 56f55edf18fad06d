"""JavaScript clients on the default model; each script is a suite of Node's own test runner."""

from pathlib import Path

import pytest

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.outside_clients import OutsideClients

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("script", ["openai.test.mjs", "ai.test.mjs"])
def test_a_suite_passes(
    outside: OutsideClients, stack: LiveStack, tmp_path: Path, script: str
) -> None:
    outside.run_node(script, tmp_path, DIPTYCH_URL=stack.base_url, DIPTYCH_MODEL=MODEL)

"""npm's `eventsource` goes on by `Last-Event-ID` after its gateway was killed."""

import json
import shutil
import subprocess
from pathlib import Path

import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack, free_port
from diptych_testkit.outside_clients import OutsideClients

pytestmark = pytest.mark.clients

STORY = "Write a long story about a lighthouse keeper."
KILLED_AFTER = 20


def undisturbed(client: openai.OpenAI) -> str:
    whole = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": STORY}], temperature=0, max_tokens=120
    )
    assert whole.choices[0].message.content
    return whole.choices[0].message.content


@pytest.mark.parametrize("kind", ["chat", "response"])
def test_a_killed_gateway_costs_no_event(
    outside: OutsideClients, stack: LiveStack, client: openai.OpenAI, tmp_path: Path, kind: str
) -> None:
    expected = undisturbed(client)
    port = str(free_port())
    gateway = stack.start("gateway", PORT=port)
    gateway.wait_ready()
    url = f"http://127.0.0.1:{port}/v1"
    (tmp_path / "node_modules").symlink_to(outside.folder / "node_modules")
    script = shutil.copy(outside.source / "npm/eventsource.mjs", tmp_path)
    with subprocess.Popen(
        [outside.command("node"), script],
        env=outside.environment(DIPTYCH_URL=url, DIPTYCH_MODEL=MODEL, KIND=kind),
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        events = []
        try:
            for line in reader.stdout:
                events.append(json.loads(line))
                if len(events) == KILLED_AFTER:
                    gateway.kill()
                    gateway = stack.start("gateway", PORT=port)
        finally:
            reader.kill()
            gateway.stop()
    assert "".join(event["text"] for event in events) == expected
    ids = [event["id"] for event in events]
    assert len(set(ids)) == len(ids), "none twice"

"""The `llm` command, told of this server by one YAML file."""

import json
from pathlib import Path

import pytest

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.outside_clients import OutsideClients

pytestmark = pytest.mark.clients

MODELS = """
- model_id: here
  model_name: {model}
  api_base: "{url}"
"""


def test_the_llm_command_asks_and_goes_on(
    outside: OutsideClients, stack: LiveStack, tmp_path: Path
) -> None:
    models = MODELS.format(model=MODEL, url=stack.base_url)
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    llm = outside.command("llm")

    def said(*arguments: str) -> str:
        settings = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
        return outside.run([llm, *arguments], tmp_path, settings)

    ask = ("-m", "here", "-o", "temperature", "0")
    system = ("-s", "You are a helpful assistant.")
    answer = "The capital of France is Paris."
    asked = "What is the capital of France?"
    assert said(*ask, *system, asked).strip() == answer
    assert said(*ask, *system, "--no-stream", asked).strip() == answer
    assert said("-c", "-o", "temperature", "0", "-o", "max_tokens", "8", "And of Italy?").strip()
    logs = json.loads(said("logs", "-n", "2", "--json"))
    first, second = (turn["input_tokens"] for turn in logs)
    assert second > first + 10, "the first turn went along"

"""The README's examples, run as they stand there, but for the port."""

import re
from pathlib import Path

import pytest

from diptych_testkit.live_stack import LiveStack
from diptych_testkit.outside_clients import OutsideClients

pytestmark = pytest.mark.clients

README = Path(__file__).parents[2] / "README.md"
HERE = "127.0.0.1:8080"


def examples() -> list[tuple[str, str]]:
    """Language and text of each block in the section on clients."""
    section = README.read_text().partition("## Talk to it\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_there_is_an_example_for_everybody() -> None:
    assert [language for language, _ in examples()] == ["sh", "python", "js", "js"]
    assert all(text.count(HERE) == 1 for _, text in examples())


@pytest.mark.parametrize(
    ("language", "text"), examples(), ids=["curl", "python", "javascript", "websocket"]
)
def test_an_example_runs(
    outside: OutsideClients, stack: LiveStack, tmp_path: Path, language: str, text: str
) -> None:
    run = {"sh": "bash", "python": outside.command("python"), "js": outside.command("node")}
    script = tmp_path / f"example.{'mjs' if language == 'js' else language}"
    script.write_text(text.replace(HERE, f"127.0.0.1:{stack.port}"))
    (tmp_path / "node_modules").symlink_to(outside.folder / "node_modules")
    printed = outside.run([run[language], str(script)], tmp_path)
    if language == "sh":
        deltas = re.findall(r'"delta":"(.*?)"', printed)
        assert printed.rstrip().endswith("data: [DONE]")
        printed = "".join(deltas)
    assert "Paris" in printed

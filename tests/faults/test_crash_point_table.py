"""Every test that `docs/testing.md` names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_test_exists() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    written = "\n".join(
        path.read_text()
        for folder in ("libs", "services", "tests")
        for path in sorted((ROOT / folder).rglob("test_*.py"))
    )
    files = {
        path.stem
        for folder in ("libs", "services", "tests")
        for path in (ROOT / folder).rglob("test_*.py")
    }
    tests = re.findall(r"def test_(\w+)", written)
    rows = [line.split("|")[3] for line in page.splitlines() if line.count("|") == 4]
    named = [name.strip("…") for row in rows for name in re.findall(r"`([\w/…]+)`", row)]
    assert len(named) > 60
    for name in named:
        known = name.rsplit("/", 1)[-1]
        assert known in files or any(known in test for test in tests), f"no test {name!r}"

"""What the pages name is there: links, headings, commands and their options, settings."""

import argparse
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from diptych_chassis.settings import ServiceSettings
from diptych_cli.commands import build_parser
from diptych_decode_worker.settings import DecodeWorkerSettings
from diptych_gateway.settings import GatewaySettings
from diptych_power_governor.settings import GovernorSettings
from diptych_prefill_worker.settings import PrefillWorkerSettings
from diptych_scheduler.settings import SchedulerSettings

TOP = Path(__file__).parents[2]
FOLDERS = ("docs", "libs", "services", "infra", "bench")
PAGES = sorted([*TOP.glob("*.md"), *(p for f in FOLDERS for p in (TOP / f).rglob("*.md"))])
SETTINGS: dict[str, type[ServiceSettings]] = {
    "ALL": ServiceSettings,
    "GATEWAY": GatewaySettings,
    "SCHEDULER": SchedulerSettings,
    "PREFILL_WORKER": PrefillWorkerSettings,
    "DECODE_WORKER": DecodeWorkerSettings,
    "POWER_GOVERNOR": GovernorSettings,
}
PARSER = build_parser()
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))


@cache
def headings(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in found)


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or (target.exists() and (not heading or heading in headings(target))):
            continue
        dead.append(link)
    assert dead == []


def commands(page: Path) -> Iterator[list[str]]:
    """The words behind each `diptych` in code."""
    text = page.read_text()
    code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    .*$", text, re.MULTILINE)
    code += "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)).splitlines()
    for line in code:
        found = re.search(r"(?:^|[\s(=])(?:\.venv/bin/)?diptych ([a-z-][^#;|)<]*)", line)
        if found and "helm" not in line:
            yield found[1].split()


def unknown(words: list[str]) -> str:
    """The first word of a command that `diptych` does not know; empty if it knows all."""
    parser, options = PARSER, set()
    for word in words:
        verbs = {
            v: p
            for a in parser._actions
            if isinstance(a, argparse._SubParsersAction)
            for v, p in a.choices.items()
        }
        options |= set(parser._option_string_actions)
        if word.startswith("--"):
            if word.partition("=")[0] not in options:
                return word
        elif word in verbs:
            parser = verbs[word]
        elif verbs and not (set(words) & options):
            return word
    return ""


@every_page
def test_every_command_is_there(page: Path) -> None:
    assert {" ".join(words): word for words in commands(page) if (word := unknown(words))} == {}


@every_page
def test_every_setting_is_there(page: Path) -> None:
    """Those that are written out: `DIPTYCH_<SERVICE>__<NAME>`, `GATEWAY__<NAME>`."""
    named = re.findall(r"(?<![A-Z_])(?:DIPTYCH_)?([A-Z_]+)__([A-Z][A-Z0-9_]*)", page.read_text())
    services = {name: set(of.__dataclass_fields__) for name, of in SETTINGS.items()}
    absent = [
        f"{service}__{name}"
        for service, name in named
        if service in services
        and name not in ("NAME", "X")
        and name.lower() not in services[service]
    ]
    assert absent == []

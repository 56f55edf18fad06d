"""`docs/operations.md` names metrics to alert on: each exists; what counts harm has an alert."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from diptych_telemetry import metrics, worker_metrics

PAGE = Path(__file__).parents[3] / "docs/operations.md"
_METRIC = re.compile(r"`((?:diptych|vllm|process)[a-z_:]+)(?:\{[^`]*\})?`")
_ROOMS = (
    metrics.process,
    metrics.gateway,
    metrics.scheduler,
    metrics.transfers,
    metrics.parking,
    metrics.tiers,
    metrics.power,
)


def rows() -> list[str]:
    """The first cells of the table of alerts, and the other cells."""
    table = PAGE.read_text().partition("## Alerts")[2]
    return [line for line in table.splitlines() if line.startswith("| `")]


def exported() -> set[str]:
    for room in _ROOMS:
        room()
    worker_metrics.steps()
    worker_metrics.vllm("m")
    names = set()
    for family in text_string_to_metric_families(metrics.render().decode()):
        names |= {family.name} | {sample.name for sample in family.samples}
        if family.type == "counter":
            names.add(f"{family.name}_total")
    return names


def test_every_metric_the_page_names_exists() -> None:
    named = {name for row in rows() for name in _METRIC.findall(row)}
    assert len(named) > 20
    assert named - exported() == set()


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    for row in rows():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(len(cell) > 10 for cell in cells), row


def test_every_metric_worth_an_alert_has_one() -> None:
    """What counts losses, refusals or exhaustion stands on the page."""
    named = {name for row in rows() for name in _METRIC.findall(row)}
    for name in exported():
        if re.search(r"(lost|alarms|refused|fences|adoptions|quarantined|queued).*", name):
            plain = re.sub(r"_created$", "_total", name)
            assert plain in named or f"{plain}_total" in named, name

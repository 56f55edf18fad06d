"""`diptych doctor links`: what KV would cross between each pair of workers, and why."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diptych_bus.port import Bus
from diptych_cli import link_checks, link_pairs
from diptych_cli.checks import Finding
from diptych_cli.failing import CliError
from diptych_cli.identities import listed
from diptych_cli.joining import joined
from diptych_cli.kv import collected
from diptych_cli.tables import printable
from diptych_contracts import subjects
from diptych_contracts.control import KvAsk, KvSnapshot
from diptych_contracts.errors import DiptychError
from diptych_contracts.fleet import WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_contracts.link_reports import LinksAsk, LinksReport
from diptych_contracts.streams import WORKERS
from diptych_kvlink.links import LinkSettings
from diptych_kvlink.nixl_library import LOOPBACK
from diptych_kvlink.surveying import survey

_ANSWER_S = 3.0
"""A worker may have to wake its GPUs' driver."""
_LAST = 32
"""Ended transfers of each worker that are looked at."""


@dataclass(slots=True)
class Stack:
    """What a running stack's workers say."""

    registrations: list[WorkerRegistration]
    reports: dict[Incarnation, LinksReport] = field(default_factory=dict)
    last_used: dict[tuple[str, str], str] = field(default_factory=dict)


def doctor_links(running: Callable[[], str]) -> int:
    """Print what this machine has, and each worker and pair of a stack that runs.

    `running` gives its bus, or raises `CliError` if there is none.
    """
    network = os.environ.get("DIPTYCH_ALL__KV_NIXL", LOOPBACK)
    for finding in link_checks.machine(
        survey(Incarnation("this machine"), LinkSettings(nixl_network=network))
    ):
        _say(finding)
    print()
    try:
        nats_url = running()
    except CliError as err:
        print(f"Pairs of workers are not shown: {err}")
        return 0
    stack = asyncio.run(_asked(nats_url))
    for line in link_pairs.workers(stack.registrations, stack.reports):
        print(printable(line))
    print()
    for finding in link_pairs.pairs(stack.registrations, stack.reports, stack.last_used):
        _say(finding)
    return 0


async def _asked(nats_url: str) -> Stack:
    async with joined(nats_url) as bus:
        kept = await listed(bus.bucket(WORKERS, WorkerRegistration))
        found = Stack(sorted((each.value for each in kept), key=lambda worker: worker.worker))
        reports = await asyncio.gather(*(_report(bus, w.worker) for w in found.registrations))
        found.reports = {report.worker: report for report in reports if report is not None}
        found.last_used = last_used(await collected(bus, KvAsk(ended=_LAST)))
    return found


async def _report(bus: Bus, worker: Incarnation) -> LinksReport | None:
    try:
        report: LinksReport = await bus.request(
            subjects.control(worker), LinksAsk(), LinksReport, timeout_s=_ANSWER_S
        )
    except DiptychError:
        return None
    return report


def last_used(snapshots: Sequence[KvSnapshot]) -> dict[tuple[str, str], str]:
    """By writer and reader, the link of the newest transfer that was handed over."""
    newest: dict[tuple[str, str], tuple[int, str]] = {}
    for snapshot in snapshots:
        for transfer in snapshot.transfers:
            if transfer.reason != "imported":
                continue
            key, age = (transfer.writer, str(snapshot.worker)), transfer.ended_ms
            if key not in newest or age < newest[key][0]:
                newest[key] = (age, transfer.link)
    return {key: link for key, (_, link) in newest.items()}


def _say(finding: Finding) -> None:
    print(printable(f"{finding.grade.value} {finding.about}: {finding.found}"), flush=True)
    if finding.advice:
        print(printable(f"    {finding.advice}"), flush=True)

"""`diptych doctor links`: what KV would cross between each pair of workers, and why."""

import asyncio
from collections.abc import Callable

from diptych_cli import link_checks
from diptych_cli.checks import Finding
from diptych_cli.failing import CliError
from diptych_cli.identities import listed
from diptych_cli.joining import joined
from diptych_cli.presence import StackFile
from diptych_contracts.fleet import WorkerRegistration
from diptych_contracts.streams import WORKERS


def doctor_links(running: Callable[[], StackFile]) -> int:
    """Print what this machine has, and each pair of the running stack, if there is one."""
    for finding in link_checks.machine():
        _say(finding)
    print()
    try:
        stack = running()
    except CliError as err:
        print(f"Pairs of workers are not shown: {err}")
        return 0
    for finding in link_checks.pairs(asyncio.run(_registrations(stack))):
        _say(finding)
    return 0


async def _registrations(stack: StackFile) -> list[WorkerRegistration]:
    async with joined(stack.nats_url) as bus:
        kept = await listed(bus.bucket(WORKERS, WorkerRegistration))
    return sorted((each.value for each in kept), key=lambda worker: worker.worker)


def _say(finding: Finding) -> None:
    print(f"{finding.grade.value} {finding.about}: {finding.found}", flush=True)
    if finding.advice:
        print(f"    {finding.advice}", flush=True)

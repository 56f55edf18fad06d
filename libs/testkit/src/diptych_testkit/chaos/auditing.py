"""After the load: what became of every request, and what is still held."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from urllib.error import URLError
from urllib.request import urlopen

from diptych_testkit.chaos.alarms import false_alarms, losses, returns
from diptych_testkit.chaos.checking import NONE, Damage, Outcome, Piece, Told, compare, judge
from diptych_testkit.chaos.crew import REPLICAS, Crew, Replica
from diptych_testkit.chaos.pauses import Struck, pauses
from diptych_testkit.chaos.plan import Target
from diptych_testkit.chaos.table import Report, Sample
from diptych_testkit.chaos.undisturbed import Undisturbed
from diptych_testkit.chaos.watching import Watch

GRACE_S = 45.0
"""Answers nobody came back for go on for 30 s."""
PATIENCE_S = 60.0
"""Beyond both, at any pace."""
AFTER_S = 5.0
"""After the last request nothing may be held any more."""


async def audit(
    report: Report, told: Sequence[Told], crew: Crew, watch: Watch, undisturbed: Undisturbed
) -> None:
    """Fill `report` in."""
    await watch.ended(GRACE_S + (PATIENCE_S if report.any_pace else 0))
    await asyncio.sleep(AFTER_S)
    give_up_s = time.monotonic() + (PATIENCE_S if report.any_pace else 0)
    while True:
        report.unended = watch.unended()
        report.stored = await watch.stored_requests()
        report.held = await _held(crew, watch)
        if not (report.stored or report.held) or time.monotonic() > give_up_s:
            break
        await asyncio.sleep(1.0)
    report.accepted = sum(record.request_seq > 0 for record in watch.records.values())
    report.crashes = [f"{c.who} ended with {c.code}: {c.last_words}" for c in crew.crashes]
    _judge(report, told, watch, undisturbed)
    report.journal = await _journal(told, watch, undisturbed)
    await asyncio.to_thread(_alarms, report, crew)


async def _held(crew: Crew, watch: Watch) -> list[str]:
    workers = [*crew.of(Target.PREFILL), *crew.of(Target.DECODE)]
    held = [str(h) for h in await watch.held(w.incarnation for w in workers) if h]
    for replica in crew.of(Target.SCHEDULER):
        owned = await asyncio.to_thread(metric, replica, "diptych_scheduler_owned_requests")
        if owned:
            held.append(f"{replica.incarnation} owns {owned:g} requests")
    return held


def _judge(report: Report, told: Sequence[Told], watch: Watch, undisturbed: Undisturbed) -> None:
    for one in told:
        struck = [s for s in report.struck if _overlaps(one, s)]
        report.verdicts.append(
            judge(
                one,
                undisturbed.expected(one.ask),
                gateway_struck=any(_is_its_gateway(one, s) for s in struck),
            )
        )
        fences_s = watch.fences_s.get(one.request_id, ())
        found = pauses(one, report.struck, fences_s)
        by_number = {s.fault.number: s for s in report.struck}
        report.pauses += [Sample(by_number[number], gap) for number, gap in found.items()]
        if not struck and len(one.times_s) > 1:
            report.calm_s.append(max(b - a for a, b in pairwise(one.times_s)))


def _overlaps(told: Told, struck: Struck) -> bool:
    return told.began_s < struck.ended_s and struck.began_s < told.ended_s


def _is_its_gateway(told: Told, struck: Struck) -> bool:
    fault = struck.fault
    if fault.target is not Target.GATEWAY:
        return False
    return fault.replica % REPLICAS[Target.GATEWAY] == told.gateway


async def _journal(told: Sequence[Told], watch: Watch, undisturbed: Undisturbed) -> Damage:
    """The answers as the journals tell them, against the undisturbed ones."""
    views = await watch.answers()
    damage = NONE
    for one in told:
        view = views.get(one.request_id)
        if view is None:
            continue
        expected = _as_pieces(undisturbed.token_ids(one.ask))
        complete = one.outcome is Outcome.FINISHED
        damage += compare(list(_as_pieces(view.token_ids)), list(expected), complete=complete)
    return damage


def _as_pieces(ids: Sequence[int]) -> Iterator[Piece]:
    return (Piece(index, str(token)) for index, token in enumerate(ids))


def _alarms(report: Report, crew: Crew) -> None:
    for log in crew.scheduler_logs():
        lines = log.read_text(errors="replace").splitlines()
        report.losses += losses(lines)
        report.returned += returns(lines)
    offset_s = time.time() - time.monotonic()
    report.false_alarms = false_alarms(report.losses, report.struck, unix_offset_s=offset_s)


def metric(replica: Replica, name: str) -> float:
    """A metric of a process, over all its labels; 0 if it has none."""
    url = f"http://127.0.0.1:{replica.process.health_port}/metrics"
    try:
        with urlopen(url, timeout=2) as answer:
            text = answer.read().decode()
    except (URLError, TimeoutError):
        return 0.0
    found = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)

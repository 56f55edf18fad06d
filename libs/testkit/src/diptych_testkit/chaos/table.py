"""What a run comes to: its figures as a table, and the promises that were not kept."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from diptych_testkit.chaos.alarms import Loss
from diptych_testkit.chaos.checking import NONE, Damage, Outcome, Verdict
from diptych_testkit.chaos.pauses import Pause, Struck, allowed_s, percentile
from diptych_testkit.chaos.plan import names

MIN_STREAMS = 16
_SHOWN_STORED = 20
_P = 99


@dataclass(frozen=True, slots=True)
class Sample:
    """A pause and the fault it belongs to."""

    struck: Struck
    pause: Pause


@dataclass(slots=True)
class Report:
    """Everything that was seen."""

    seed: int
    took_s: float
    planned: int
    streams: int
    struck: list[Struck] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    pauses: list[Sample] = field(default_factory=list)
    """Of streams that depended on the victim."""
    calm_s: list[float] = field(default_factory=list)
    """Longest pause of each stream that no fault touched."""
    least_in_flight: int = 0
    """Between two faults."""
    least_while_struck: int = 0
    """While a fault lasts, and its recovery."""
    accepted: int = 0
    journal: Damage = NONE
    """As the journal tells the answers, whoever read them."""
    unended: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    """Messages left in stream `REQUESTS`."""
    held: list[str] = field(default_factory=list)
    """What workers and schedulers still hold 5 s after the last request."""
    losses: list[Loss] = field(default_factory=list)
    false_alarms: list[Loss] = field(default_factory=list)
    returned: int = 0
    """Members that were declared lost and beat again, as their schedulers told it."""
    crashes: list[str] = field(default_factory=list)
    broken_off: str = ""
    """Why the run did not come to its end."""
    any_pace: bool = False
    """Whether figures of time break no promise."""

    @property
    def damage(self) -> Damage:
        """Over all clients."""
        return sum((verdict.damage for verdict in self.verdicts), NONE)

    def count(self, outcome: Outcome) -> int:
        """How many requests ended so."""
        return sum(verdict.told.outcome is outcome for verdict in self.verdicts)


def broken_promises(report: Report) -> list[str]:
    """One line per promise that was not kept."""
    broken = [report.broken_off] if report.broken_off else []
    for verdict in report.verdicts:
        told = verdict.told
        who = f"{told.ask.api} {told.request_id or '(no id)'} of gateway {told.gateway}"
        broken += [f"{who}: {promise}" for promise in verdict.broken]
    if report.journal:
        broken.append(f"journals and undisturbed answers differ: {report.journal}")
    broken += [f"no terminal event: {request}" for request in report.unended]
    if report.stored:
        broken.append(f"{len(report.stored)} requests are still stored though all have ended")
        broken += report.stored[:_SHOWN_STORED]
    broken += [f"held without an owner: {held}" for held in report.held]
    broken += [f"crashed: {crash}" for crash in report.crashes]
    if len(report.struck) < report.planned:
        broken.append(f"{len(report.struck)} of {report.planned} faults were injected")
    return broken if report.any_pace else broken + list(_too_slow(report))


def _too_slow(report: Report) -> Iterator[str]:
    for alarm in report.false_alarms:
        yield f"false alarm: {alarm.observer} lost {alarm.member} after {alarm.silent_s:.1f} s"
    if report.least_in_flight < min(MIN_STREAMS, report.streams):
        yield f"only {report.least_in_flight} streams ran at one moment"
    yield from _too_long(report.pauses)


def _too_long(samples: Sequence[Sample]) -> Iterator[str]:
    for name in names():
        mine = [sample for sample in samples if sample.struck.fault.name == name]
        over = [_over_s(sample) for sample in mine]
        if over and percentile(over, _P) > 0:
            yield f"pauses after {name}: p{_P} is {percentile(over, _P):.1f} s too long"


def _over_s(sample: Sample) -> float:
    allowed = allowed_s(sample.struck.fault)
    if allowed is None:
        return 0.0
    return sample.pause.noticing_s - allowed


def lines(report: Report) -> list[str]:
    """The table."""
    broken = broken_promises(report)
    return [
        f"chaos, seed {report.seed}: {len(report.struck)} faults in {report.took_s:.0f} s, "
        f"{report.least_in_flight} streams at least, {report.least_while_struck} while struck",
        "",
        *_fault_lines(report),
        "",
        *_request_lines(report),
        "",
        *_alarm_lines(report),
        "",
        *(["broken promises:", *(f"  {line}" for line in broken)] if broken else ["all kept"]),
    ]


def _fault_lines(report: Report) -> Iterator[str]:
    yield f"{'fault':<24}{'times':>6}{'hit':>6}   longest pause of a stream it hit, in s"
    yield f"{'':<36}{'p50':>8}{'p99':>8}{'max':>8}{'  p99 without re-prefill':>24}"
    for name in names():
        times = sum(struck.fault.name == name for struck in report.struck)
        mine = [sample.pause for sample in report.pauses if sample.struck.fault.name == name]
        took = [pause.took_s for pause in mine]
        noticing = [pause.noticing_s for pause in mine]
        yield (
            f"{name:<24}{times:>6}{len(mine):>6}{percentile(took, 50):>8.2f}"
            f"{percentile(took, _P):>8.2f}{max(took, default=0.0):>8.2f}"
            f"{percentile(noticing, _P):>24.2f}"
        )
    calm = report.calm_s
    yield (
        f"{'(none)':<24}{'':>6}{len(calm):>6}{percentile(calm, 50):>8.2f}"
        f"{percentile(calm, _P):>8.2f}{max(calm, default=0.0):>8.2f}"
    )


def _request_lines(report: Report) -> Iterator[str]:
    asked = len(report.verdicts)
    resumed = sum(verdict.told.resumed > 0 for verdict in report.verdicts)
    yield f"requests    {asked} asked, {report.accepted} accepted, {resumed} resumed elsewhere"
    yield "            " + ", ".join(f"{report.count(o)} {o}" for o in Outcome)
    for outcome in (Outcome.FAILED, Outcome.BROKEN, Outcome.REFUSED):
        reasons = Counter(
            verdict.told.detail[:90]
            for verdict in report.verdicts
            if verdict.told.outcome is outcome
        )
        for reason, count in reasons.most_common(5):
            yield f"            {count} {outcome}: {reason}"
    damage = report.damage
    pieces = sum(len(verdict.told.pieces) for verdict in report.verdicts)
    yield (
        f"tokens      {pieces} checked: {damage.lost} lost, {damage.repeated} repeated, "
        f"{damage.reordered} reordered, {damage.changed} changed"
    )
    yield (
        f"at the end  {len(report.unended)} requests without an end, {len(report.stored)} stored, "
        f"{len(report.held)} workers or schedulers that hold something"
    )


def _alarm_lines(report: Report) -> Iterator[str]:
    yield (
        f"declared lost {len(report.losses)}, of these running all the while "
        f"{len(report.false_alarms)}; came back {report.returned}"
    )

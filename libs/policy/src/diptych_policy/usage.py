"""What an ended request used, and how days are summed so that no event is counted twice.

Every event of a request that ended stands in stream `EVENTS`, once. Whoever sums reads on from the
cursor, in the stream's order, adds to each tenant's day what it does not hold yet (the day knows up
to which event), and moves the cursor last. So several may do so at once, and any may die between
two steps: nothing is added twice and nothing is left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from diptych_contracts.events import RequestEnded
from diptych_contracts.journal import Report
from diptych_contracts.usage import UsageDay, Used

SIMULATED = "sim"
"""What `Report.energy_source` says where there is no meter."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An event at its place in the stream."""

    seq: int
    event: RequestEnded
    unix_ms: int
    """When the stream took it."""


@dataclass(frozen=True, slots=True)
class DayOf:
    """A tenant's day (UTC), `yyyy-mm-dd`."""

    tenant: str
    day: str


def used(event: RequestEnded) -> Used:
    """What a request used, of its last attempt: what a dead worker cost, its client does not pay.

    One that ended without a word of a worker's (cancelled in the queue, say) used its tokens only.
    """
    report = event.end.report or Report()
    simulated = report.energy_source == SIMULATED
    return Used(
        requests=1,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=min(report.cached_tokens, event.prompt_tokens),
        answer_tokens=event.answer_tokens,
        kv_token_s=kv_token_s(report, event.prompt_tokens, event.answer_tokens),
        prefill_j=report.prefill_j,
        decode_j=report.decode_j,
        sim_j=report.prefill_j + report.decode_j if simulated else 0.0,
    )


def kv_token_s(report: Report, prompt_tokens: int, answer_tokens: int) -> float:
    """KV held, in tokens times seconds.

    It grows evenly from nothing to the prompt while prefill runs, stays while it is handed over,
    and grows evenly by the answer while decode runs:
    P·prefill/2 + P·transfer + (P + A/2)·decode.
    """
    p, a = prompt_tokens, answer_tokens
    ms = p * (report.prefill_ms / 2 + report.transfer_ms) + (p + a / 2) * report.decode_ms
    return ms / 1000


def by_day(items: Iterable[Ended]) -> dict[DayOf, list[Ended]]:
    """The events that count, by the day they belong to, in the stream's order."""
    found: dict[DayOf, list[Ended]] = {}
    for item in items:
        event = item.event
        if event.tenant:
            day = datetime.fromtimestamp(item.unix_ms / 1000, UTC).date().isoformat()
            found.setdefault(DayOf(event.tenant, day), []).append(item)
    return found


def added(kept: UsageDay | None, of: DayOf, items: Iterable[Ended]) -> tuple[UsageDay, Used] | None:
    """A day with those of `items` that it does not hold yet, and their sum; None: it holds all."""
    upto_seq = kept.upto_seq if kept is not None else 0
    fresh = [item for item in items if item.seq > upto_seq]
    if not fresh:
        return None
    more = total(used(item.event) for item in fresh)
    before = kept.used if kept is not None else Used()
    day = UsageDay(tenant=of.tenant, day=of.day, used=total((before, more)), upto_seq=fresh[-1].seq)
    return day, more


def total(amounts: Iterable[Used]) -> Used:
    """All of them together."""
    sums: dict[str, float] = dict.fromkeys(Used.__struct_fields__, 0)
    for amount in amounts:
        for name, value in amounts_of(amount).items():
            sums[name] += value
    return msgspec.convert(sums, Used)


def amounts_of(amount: Used) -> Mapping[str, float]:
    """An amount, by what it is of."""
    return {name: getattr(amount, name) for name in Used.__struct_fields__}

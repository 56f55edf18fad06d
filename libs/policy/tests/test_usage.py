"""What tenants used: each event once, however often and by whomever it is read."""

from random import Random

import msgspec
import pytest

from diptych_contracts.events import RequestEnded
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import End, EndReason, Report
from diptych_contracts.usage import UsageDay, Used
from diptych_policy.usage import DayOf, Ended, added, by_day, kv_token_s, total, used

DAY_MS = 86_400_000


def ended(seq: int, tenant: str = "acme", *, at_ms: int = 0, report: Report | None = None) -> Ended:
    end = End(request_id=RequestId(f"r{seq}"), attempt=1, reason=EndReason.STOP, report=report)
    event = RequestEnded(
        request_id=end.request_id,
        end=end,
        tenant=tenant,
        prompt_tokens=100,
        answer_tokens=10,
    )
    return Ended(seq, event, at_ms)


def test_what_a_request_used() -> None:
    report = Report(
        prefill_ms=2000,
        transfer_ms=100,
        decode_ms=1000,
        prefill_j=3.0,
        decode_j=4.0,
        cached_tokens=120,
    )
    assert used(ended(1, report=report).event) == Used(
        requests=1,
        prompt_tokens=100,
        cached_tokens=100,
        answer_tokens=10,
        kv_token_s=pytest.approx(100 * 1.0 + 100 * 0.1 + 105 * 1.0),
        prefill_j=3.0,
        decode_j=4.0,
        sim_j=7.0,
    )
    measured = msgspec.structs.replace(report, energy_source="nvml")
    assert used(ended(1, report=measured).event).sim_j == 0


def test_one_that_never_ran_used_its_prompt_only() -> None:
    nothing_held = used(ended(1).event)
    assert (nothing_held.kv_token_s, nothing_held.decode_j) == (0.0, 0.0)
    assert kv_token_s(Report(), 5, 5) == 0


def test_days_are_those_of_the_end_in_utc() -> None:
    days = by_day([ended(1), ended(2, at_ms=DAY_MS), ended(3, "other"), ended(4, tenant="")])
    assert set(days) == {
        DayOf("acme", "1970-01-01"),
        DayOf("acme", "1970-01-02"),
        DayOf("other", "1970-01-01"),
    }


def test_a_day_begins_at_midnight_and_not_before() -> None:
    items = [ended(1, at_ms=DAY_MS - 1), ended(2, at_ms=DAY_MS)]
    assert [day.day for day in by_day(items)] == ["1970-01-01", "1970-01-02"]


def test_what_a_day_holds_is_not_added_again() -> None:
    of = DayOf("acme", "1970-01-01")
    first = added(None, of, [ended(1), ended(2)])
    assert first is not None
    day, more = first
    assert (day.used.requests, more.requests, day.upto_seq) == (2, 2, 2)
    assert added(day, of, [ended(1), ended(2)]) is None
    again = added(day, of, [ended(2), ended(5)])
    assert again is not None
    assert (again[0].used.requests, again[1].requests, again[0].upto_seq) == (3, 1, 5)


@pytest.mark.parametrize("seed", range(20))
def test_many_who_sum_and_die_at_any_step_count_each_event_once(seed: int) -> None:
    rng = Random(seed)
    events = [ended(seq, rng.choice(("a", "b", "c"))) for seq in range(1, 200)]
    days: dict[DayOf, UsageDay] = {}
    cursor = 0
    while cursor < len(events):
        start = rng.randrange(cursor + 1)  # one who read the cursor long ago
        upto = rng.randrange(max(start, cursor), len(events) + 1)
        batch = list(by_day(events[start:upto]).items())
        rng.shuffle(batch)
        alive = rng.random() < 0.7
        for of, items in batch if alive else batch[: rng.randrange(len(batch) + 1)]:
            if (found := added(days.get(of), of, items)) is not None:
                days[of] = found[0]
        if alive:
            cursor = max(cursor, upto)
    assert total(day.used for day in days.values()).requests == len(events)

import json
from dataclasses import replace

from diptych_testkit.chaos.alarms import Loss, false_alarms, losses
from diptych_testkit.chaos.asking import Api, Ask
from diptych_testkit.chaos.checking import NONE, Damage, Outcome, Told, Verdict
from diptych_testkit.chaos.pauses import Pause, Struck, pauses, percentile
from diptych_testkit.chaos.plan import Fault, Kind, Target
from diptych_testkit.chaos.table import Report, Sample, broken_promises, lines

ASK = Ask(prompt=0, api=Api.CHAT, max_tokens=5)
KILL = Fault(0, 10.0, Kind.KILL, Target.DECODE, 0, 0.5)
FREEZE = Fault(1, 20.0, Kind.FREEZE, Target.SCHEDULER, 0, 4.0)


def struck(fault: Fault = KILL, *hit: str, began_s: float = 100.0, took_s: float = 6.0) -> Struck:
    return Struck(fault, "d1", began_s, began_s + took_s, frozenset(hit))


def streamed(*times_s: float, request_id: str = "r1") -> Told:
    told = Told(ASK, 90.0, request_id=request_id, outcome=Outcome.FINISHED, ends=1)
    told.times_s = list(times_s)
    told.ended_s = times_s[-1]
    return told


def test_the_longest_gap_around_a_fault_is_its_pause() -> None:
    told = streamed(95.0, 98.5, 99.9, 103.4, 103.6)
    assert pauses(told, [struck(KILL, "r1")], ()) == {0: Pause(99.9, 103.4)}


def test_what_follows_the_fence_is_prefilled_again() -> None:
    told = streamed(99.9, 103.4)
    (pause,) = pauses(told, [struck(KILL, "r1")], (50.0, 101.1)).values()
    assert round(pause.took_s, 3) == 3.5
    assert round(pause.noticing_s, 3) == 1.2


def test_a_pause_belongs_to_the_fault_that_began_it() -> None:
    faults = [struck(KILL, "r1"), struck(FREEZE, "r1", began_s=108.0)]
    assert pauses(streamed(99.9, 112.0, 112.1), faults, ()).keys() == {0}
    assert pauses(streamed(99.9, 100.2, 107.9, 112.0), faults, ()).keys() == {0, 1}


def test_a_stream_that_did_not_depend_on_the_victim_is_not_counted() -> None:
    assert pauses(streamed(99.9, 103.4), [struck(KILL, "other")], ()) == {}


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99)) == (50.0, 99.0)
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 99) == 0.0


def test_losses_are_read_from_a_schedulers_log() -> None:
    lost = {
        "ts": "2026-01-01T00:00:10Z",
        "event": "member_lost",
        "incarnation": "s1",
        "member": "d1",
        "silent_ms": 1050,
    }
    log = [json.dumps(lost), json.dumps({"event": "request_adopted"}), '{"event":"member_lost"']
    assert losses(log) == [Loss("s1", "d1", 1767225610.0, 1.05)]


def test_only_the_loss_of_a_member_that_ran_is_a_false_alarm() -> None:
    after_kill = Loss("s1", "d1", 1101.2, 1.05)
    of_another = Loss("s1", "d2", 1101.2, 1.05)
    long_after = Loss("s1", "d1", 1200.0, 1.05)
    before = Loss("s1", "d1", 1099.0, 1.05)
    said = [after_kill, of_another, long_after, before]
    found = false_alarms(said, [struck()], unix_offset_s=1000.0)
    assert found == [of_another, long_after, before]


def a_report() -> Report:
    return Report(seed=3, took_s=60.0, planned=1, streams=16, struck=[struck()], least_in_flight=16)


def test_a_clean_run_says_so() -> None:
    report = a_report()
    report.verdicts = [Verdict(streamed(1.0, 2.0), NONE, ())]
    report.pauses = [Sample(struck(), Pause(0.0, 9.0, 1.9))]
    assert broken_promises(report) == []
    text = "\n".join(lines(report))
    assert "seed 3" in text
    assert "0 lost, 0 repeated, 0 reordered, 0 changed" in text
    assert text.endswith("all kept")


def test_every_broken_promise_is_named() -> None:
    report = a_report()
    report.planned = 2
    report.least_in_flight = 12
    report.verdicts = [Verdict(streamed(1.0), Damage(lost=1), ("lost tokens: 1",))]
    report.journal = Damage(changed=2)
    report.unended = ["r9 is routed"]
    report.stored = ["r5, stored as 7, is closed with 3"]
    report.held = ["d1 holds"]
    report.false_alarms = [Loss("s1", "d2", 0.0, 1.0)]
    report.crashes = ["gateway ended with 1"]
    report.pauses = [Sample(struck(), Pause(0.0, 9.0, 2.1))]
    report.any_pace = True
    assert len(broken_promises(report)) == 8, "without the figures of time"
    report.any_pace = False
    broken = "\n".join(broken_promises(report))
    for word in (
        "lost tokens: 1",
        "journals and undisturbed answers differ",
        "r9 is routed",
        "1 requests are still stored",
        "r5, stored as 7",
        "d1 holds",
        "s1 lost d2",
        "gateway ended with 1",
        "1 of 2 faults",
        "only 12 streams",
        "pauses after kill decode-worker",
    ):
        assert word in broken
    assert len(broken.splitlines()) == 11


def test_a_frozen_gateways_own_clients_wait_for_it() -> None:
    frozen = struck(replace(FREEZE, target=Target.GATEWAY, for_s=8.0))
    report = a_report()
    report.pauses = [Sample(frozen, Pause(0.0, 8.5))]
    assert broken_promises(report) == []
    report.pauses = [Sample(frozen, Pause(0.0, 11.5))]
    assert len(broken_promises(report)) == 1

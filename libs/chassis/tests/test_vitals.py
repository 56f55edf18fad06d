from diptych_chassis.vitals import Readiness, Vitals


def test_a_main_loop_that_serves_no_probe_is_not_live() -> None:
    vitals = Vitals(now_s=0.0)
    vitals.probe_served(1.0)
    assert vitals.live(2.9)
    assert not vitals.live(3.1)
    assert vitals.silent_s(3.5) == 2.5


def test_ready_once_is_remembered() -> None:
    vitals = Vitals(now_s=0.0)
    assert (vitals.readiness.ready, vitals.readiness.detail) == (False, "starting")
    vitals.report(Readiness(ready=True))
    vitals.report(Readiness(ready=False, detail="draining"))
    assert vitals.ever_ready
    assert vitals.readiness.detail == "draining"


def test_when_a_beat_left_is_known_for_a_while() -> None:
    vitals = Vitals(now_s=0.0)
    for count in range(1, 101):
        vitals.beat_sent(count, count / 10)
    assert vitals.beat_sent_s(100) == 10.0
    assert vitals.beat_sent_s(37) == 3.7
    assert vitals.beat_sent_s(36) is None
    assert vitals.beat_sent_s(101) is None

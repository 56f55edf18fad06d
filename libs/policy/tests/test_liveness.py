from diptych_contracts.ids import Incarnation
from diptych_policy.liveness import Liveness, MemberFound, MemberLost

ME = Incarnation("scheduler-1")
PEER = Incarnation("decode-worker-1")


def run(
    liveness: Liveness, start_s: float, end_s: float, *beating: Incarnation
) -> list[MemberFound | MemberLost]:
    """Beats and ticks every 0.1 s in [start, end)."""
    news: list[MemberFound | MemberLost] = []
    for step in range(round((end_s - start_s) * 10)):
        now_s = start_s + step / 10
        for member in beating:
            news += liveness.beat(member, now_s=now_s)
        news += liveness.tick(now_s=now_s)
    return news


def test_a_silent_member_is_lost_after_one_second() -> None:
    liveness = Liveness(ME)
    assert run(liveness, 0, 5, ME, PEER) == [MemberFound(ME), MemberFound(PEER)]
    lost = run(liveness, 5, 6.3, ME)
    assert [loss.member for loss in lost] == [PEER]
    assert not liveness.alive(PEER)
    assert run(liveness, 6.3, 7, ME, PEER) == [MemberFound(PEER, returned=True)]


def test_nobody_is_lost_while_the_bus_is_frozen() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    judged_s = liveness.judged_s
    assert run(liveness, 5, 10) == []
    assert not liveness.judging
    assert liveness.judged_s - judged_s <= 0.4
    assert run(liveness, 10, 11.5, ME) == []
    assert liveness.judging


def test_after_a_freeze_silence_restarts_with_a_grace() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    run(liveness, 5, 10)
    assert run(liveness, 10, 12.9, ME) == []
    assert [loss.member for loss in run(liveness, 12.9, 13.5, ME)] == [PEER]


def test_an_observer_that_slept_judges_nobody() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    liveness.beat(ME, now_s=15)
    assert liveness.tick(now_s=15) == []
    assert not liveness.judging


def test_absence_needs_time_to_be_told() -> None:
    liveness = Liveness(ME)
    assert not liveness.absent(PEER, now_s=100)
    run(liveness, 0, 2, ME)
    assert not liveness.absent(PEER, now_s=2)
    run(liveness, 2, 4, ME)
    assert liveness.absent(PEER, now_s=4)
    liveness.beat(PEER, now_s=4)
    assert not liveness.absent(PEER, now_s=4)


def test_a_member_that_beats_and_is_not_ready_yet_is_not_absent() -> None:
    """A gateway stores its first request up to a beat before it says that it is ready."""
    liveness = Liveness(ME)
    run(liveness, 0, 4, ME)
    assert liveness.absent(PEER, now_s=4)
    liveness.beat(PEER, now_s=4, ready=False)
    assert not liveness.absent(PEER, now_s=4)
    run(liveness, 4, 8, ME)
    assert liveness.absent(PEER, now_s=8), "it never became ready, and is silent"
    liveness.beat(PEER, now_s=8, ready=False)
    liveness.left(PEER, now_s=8)
    assert liveness.absent(PEER, now_s=8)


def test_a_member_counts_from_its_first_ready_beat_on() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 3, ME)
    assert liveness.beat(PEER, now_s=3, ready=False) == []
    assert run(liveness, 3, 6, ME) == []
    assert liveness.beat(PEER, now_s=6) == [MemberFound(PEER)]
    assert liveness.beat(PEER, now_s=6.1, ready=False) == []
    assert [loss.member for loss in run(liveness, 6.2, 8, ME)] == [PEER]


def test_a_member_that_left_is_not_lost() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    liveness.left(PEER, now_s=4.9)
    assert liveness.beat(PEER, now_s=5, ready=False) == []
    assert run(liveness, 5, 8, ME) == []
    assert not liveness.alive(PEER)
    assert liveness.departed(now_s=5.5) == []
    assert liveness.departed(now_s=6.0) == [PEER]
    assert liveness.departed(now_s=9.0) == [], "said once"


def test_a_member_whose_registration_only_expired_has_not_departed() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    liveness.left(PEER, now_s=4.9)
    assert liveness.beat(PEER, now_s=5) == [MemberFound(PEER)]
    assert liveness.departed(now_s=9.0) == []


def test_an_announced_silence_is_no_loss() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    liveness.beat(PEER, now_s=5, patience_s=10)
    assert run(liveness, 5, 15.9, ME) == []
    assert [loss.member for loss in run(liveness, 15.9, 16.5, ME)] == [PEER]


def test_an_announced_silence_is_over_with_the_next_beat() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    liveness.beat(PEER, now_s=5, patience_s=10)
    liveness.beat(PEER, now_s=5.1, patience_s=10)
    run(liveness, 5, 7, ME)
    liveness.beat(PEER, now_s=7)
    assert [loss.member for loss in run(liveness, 7, 8.5, ME)] == [PEER]


def test_an_announced_silence_has_a_limit_and_outlives_a_freeze_of_the_bus() -> None:
    liveness = Liveness(ME, max_patience_s=10)
    run(liveness, 0, 5, ME, PEER)
    liveness.beat(PEER, now_s=5, patience_s=1e9)
    run(liveness, 5, 6, ME)
    run(liveness, 6, 9)
    assert run(liveness, 9, 15.9, ME) == []
    assert [loss.member for loss in run(liveness, 15.9, 16.5, ME)] == [PEER]


def hiccup(liveness: Liveness, at_s: float, *, for_s: float, connected: bool = True) -> None:
    """The observer's own beats are late for a moment, and those of others are not heard."""
    for step in range(1, round(for_s * 10) + 1):
        liveness.tick(now_s=at_s + step / 10, connected=connected)


def test_a_hiccup_puts_off_a_death_by_no_more_than_it_took() -> None:
    """On a busy machine each of many put it off by the grace: 3.2 s instead of 1.2."""
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    hiccup(liveness, 4.9, for_s=0.6)
    assert not liveness.judging
    (lost,) = run(liveness, 5.6, 7, ME)
    assert isinstance(lost, MemberLost)
    assert liveness.judging
    assert 1.0 < lost.silent_s < 1.2


def test_a_hiccup_with_a_loss_of_the_connection_needs_the_grace() -> None:
    liveness = Liveness(ME)
    run(liveness, 0, 5, ME, PEER)
    hiccup(liveness, 4.9, for_s=0.3, connected=False)
    assert run(liveness, 5.3, 8.2, ME) == []
    assert [loss.member for loss in run(liveness, 8.2, 8.6, ME)] == [PEER]


def test_nobody_is_lost_by_hiccups_and_absence_is_told_in_spite_of_them() -> None:
    liveness = Liveness(ME)
    absent = Incarnation("scheduler-dead")
    run(liveness, 0, 2, ME, PEER)
    start_s = 2.0
    for _ in range(6):
        hiccup(liveness, start_s - 0.1, for_s=0.5)
        assert run(liveness, start_s + 0.5, start_s + 1.5, ME, PEER) == []
        start_s += 1.5
    assert liveness.absent(absent, now_s=start_s)

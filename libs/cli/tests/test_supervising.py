from collections.abc import Iterable

import pytest

from diptych_cli.orders import (
    Begun,
    ChildExited,
    ChildReady,
    Effect,
    Event,
    Finish,
    Interrupt,
    Kill,
    Start,
    StopAsked,
    TellAllReady,
    TellExit,
    TellGivenUp,
    TellLeft,
    TellReady,
    TellScaled,
    Terminate,
    TimePassed,
    Wanted,
)
from diptych_cli.supervising import KILL_LEAVING_AFTER_S, State, Supervisor

STAGES = (("nats",), ("worker", "scheduler"), ("gateway",))
EVERYBODY = ("nats", "worker", "scheduler", "gateway")


class Driver:
    """Feeds events at a time of its own and checks the invariants after each."""

    def __init__(self, **counts: int) -> None:
        self.supervisor = Supervisor(STAGES, counts)
        self.now_s = 0.0

    def tell(self, *events: Event, after_s: float = 0.0) -> list[Effect]:
        self.now_s += after_s
        effects: list[Effect] = []
        for event in events:
            effects += self.supervisor.handle(event, now_s=self.now_s)
            self.supervisor.check()
        return effects

    def wake(self) -> list[Effect]:
        assert self.supervisor.wake_s is not None
        self.now_s = self.supervisor.wake_s
        return self.tell(TimePassed())


def serving(names: Iterable[str] = (), **counts: int) -> Driver:
    driver = Driver(**counts)
    names = names or driver.supervisor.names()
    driver.tell(Begun(), *(ChildReady(name) for name in names))
    return driver


def test_a_stage_starts_when_the_one_before_is_ready() -> None:
    driver = Driver()
    assert driver.tell(Begun()) == [Start("nats")]
    assert driver.tell(ChildReady("nats"), after_s=1.0) == [
        TellReady("nats", 1.0),
        Start("worker"),
        Start("scheduler"),
    ]
    assert driver.tell(ChildReady("scheduler"), after_s=1.0) == [TellReady("scheduler", 1.0)]
    assert driver.tell(ChildReady("worker"))[-1] == Start("gateway")
    assert driver.tell(ChildReady("gateway"), after_s=0.5) == [
        TellReady("gateway", 0.5),
        TellAllReady(2.5),
    ]


def test_the_whole_is_announced_once() -> None:
    driver = serving()
    driver.tell(ChildExited("worker", -9))
    driver.wake()
    assert driver.tell(ChildReady("worker")) == [TellReady("worker", 0.0)]


def test_ready_twice_is_no_news() -> None:
    assert serving().tell(ChildReady("worker")) == []


def test_a_dead_child_comes_back_and_takes_nobody_down() -> None:
    driver = serving()
    assert driver.tell(ChildExited("nats", -9)) == [TellExit("nats", -9, 0.5)]
    assert driver.supervisor.state("gateway") is State.READY
    assert driver.wake() == [Start("nats")]
    assert driver.now_s == 0.5


def test_a_child_that_dies_before_the_last_stage_does_not_hold_its_place() -> None:
    driver = serving(("nats", "worker"))
    driver.tell(ChildExited("nats", 1))
    assert driver.tell(ChildReady("scheduler"))[-1] == Start("gateway")


def test_the_pause_doubles_up_to_ten_seconds() -> None:
    driver = serving()
    pauses = []
    for _ in range(7):
        (told,) = driver.tell(ChildExited("worker", 1))
        assert isinstance(told, TellExit)
        pauses.append(told.again_in_s)
        driver.wake()
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize(("healthy_s", "pause_s"), [(29.0, 4.0), (30.0, 0.5)])
def test_half_a_minute_of_health_is_forgiven(healthy_s: float, pause_s: float) -> None:
    driver = serving()
    for _ in range(3):
        driver.tell(ChildExited("worker", 1))
        driver.wake()
    driver.tell(ChildReady("worker"))
    told = driver.tell(ChildExited("worker", 1), after_s=healthy_s)
    assert told == [TellExit("worker", 1, pause_s if pause_s == 0.5 else 4.0)]


def test_time_that_passes_early_changes_nothing() -> None:
    driver = serving()
    driver.tell(ChildExited("worker", 1))
    assert driver.tell(TimePassed(), after_s=0.4) == []


def test_wrong_settings_stop_the_stack() -> None:
    driver = serving(("nats",))
    assert driver.tell(ChildExited("worker", 2)) == [
        TellExit("worker", 2, None),
        Terminate("scheduler"),
    ]
    assert driver.tell(ChildExited("scheduler", 0)) == [Interrupt("nats")]
    assert driver.tell(ChildExited("nats", 0)) == [Finish(1)]


def test_a_child_that_never_gets_ready_stops_the_stack() -> None:
    driver = serving(("nats",))
    for _ in range(4):
        driver.tell(ChildExited("worker", 1))
        driver.wake()
    assert driver.tell(ChildExited("worker", 1))[0] == TellExit("worker", 1, None)


def test_stopping_goes_backwards_stage_by_stage() -> None:
    driver = serving()
    assert driver.tell(StopAsked()) == [Interrupt("gateway")]
    assert driver.tell(ChildExited("gateway", 0)) == [Interrupt("worker"), Interrupt("scheduler")]
    assert driver.tell(ChildExited("worker", 0)) == []
    assert driver.tell(ChildExited("scheduler", 0)) == [Interrupt("nats")]
    assert driver.tell(ChildExited("nats", 0)) == [Finish(0)]


def test_what_rests_or_waits_needs_no_stopping() -> None:
    driver = serving(("nats",))
    driver.tell(ChildExited("worker", 1))
    assert driver.tell(StopAsked()) == [Terminate("scheduler")]


def test_stopping_before_anything_runs_finishes_at_once() -> None:
    assert Driver().tell(StopAsked()) == [Finish(0)]


def test_who_does_not_stop_is_killed_after_ten_seconds() -> None:
    driver = serving()
    driver.tell(StopAsked())
    assert driver.wake() == [Kill("gateway")]
    assert driver.now_s == 10.0
    assert driver.tell(ChildExited("gateway", -9))[0] == Interrupt("worker")


def test_asking_twice_kills_everybody() -> None:
    driver = serving()
    driver.tell(StopAsked())
    assert driver.tell(StopAsked()) == [Kill(name) for name in EVERYBODY]
    for name in EVERYBODY[:-1]:
        driver.tell(ChildExited(name, -9))
    assert driver.tell(ChildExited("gateway", -9)) == [Finish(0)]


def test_who_is_waited_for_is_known() -> None:
    driver = serving(("nats", "worker"))
    assert driver.supervisor.unready == ("scheduler",)


def test_as_many_start_as_are_wanted_and_none_may_be() -> None:
    assert Driver(nats=1, worker=3, scheduler=0).supervisor.names() == (
        "nats",
        "worker",
        "worker-2",
        "worker-3",
        "gateway",
    )


def test_one_more_is_told_once_it_serves() -> None:
    driver = serving()
    assert driver.tell(Wanted("worker", 2)) == [Start("worker-2")]
    assert driver.tell(ChildReady("worker-2"), after_s=3.0) == [
        TellReady("worker-2", 3.0),
        TellScaled("worker", ("worker", "worker-2"), 0),
    ]


def test_the_newest_leaves_and_has_time_to_finish() -> None:
    driver = serving(worker=2)
    assert driver.tell(Wanted("worker", 1)) == [Terminate("worker-2")]
    assert driver.supervisor.state("worker-2") is State.LEAVING
    assert driver.supervisor.unready == ()
    assert driver.tell(ChildExited("worker-2", 0), after_s=42.0) == [
        TellLeft("worker-2", 42.0),
        TellScaled("worker", ("worker",), 0),
    ]
    assert "worker-2" not in driver.supervisor.names()


def test_who_does_not_leave_is_killed_at_last() -> None:
    driver = serving(worker=2)
    driver.tell(Wanted("worker", 1))
    assert driver.wake() == [Kill("worker-2")]
    assert driver.now_s == KILL_LEAVING_AFTER_S
    assert driver.tell(ChildExited("worker-2", -9))[1] == TellScaled("worker", ("worker",), 0)


def test_one_that_is_wanted_again_takes_a_name_nobody_has() -> None:
    driver = serving(worker=2)
    driver.tell(Wanted("worker", 1))
    assert driver.tell(Wanted("worker", 2)) == [Start("worker-3")]
    driver.tell(ChildReady("worker-3"))
    told = driver.tell(ChildExited("worker-2", 0))
    assert told[1] == TellScaled("worker", ("worker", "worker-3"), 0)
    assert driver.tell(Wanted("worker", 3)) == [Start("worker-2")]
    assert driver.tell(ChildReady("worker-2")) != []
    assert driver.tell(Wanted("worker", 2)) == [Terminate("worker-2")]


def test_as_many_as_there_are_is_told_at_once() -> None:
    assert serving().tell(Wanted("worker", 1)) == [TellScaled("worker", ("worker",), 0)]


def test_none_of_a_service_may_be_left() -> None:
    driver = serving()
    assert driver.tell(Wanted("worker", 0)) == [Terminate("worker")]
    assert driver.tell(ChildExited("worker", 0))[1] == TellScaled("worker", (), 0)
    driver.tell(ChildExited("gateway", -9))
    assert driver.wake() == [Start("gateway")]


def test_one_that_rests_leaves_without_a_word() -> None:
    driver = serving(worker=2)
    driver.tell(ChildExited("worker-2", 1))
    assert driver.tell(Wanted("worker", 1)) == [TellScaled("worker", ("worker",), 0)]
    assert driver.supervisor.wake_s is None


def test_a_late_one_that_cannot_work_is_given_up_and_the_stack_goes_on() -> None:
    driver = serving()
    driver.tell(Wanted("worker", 2))
    assert driver.tell(ChildExited("worker-2", 2)) == [
        TellGivenUp("worker-2", 2),
        TellScaled("worker", ("worker",), 1),
    ]
    assert not driver.supervisor.stopping


def test_nobody_waits_for_a_late_one() -> None:
    driver = serving()
    driver.tell(Wanted("worker", 2), ChildExited("gateway", -9))
    assert driver.wake() == [Start("gateway")]


def test_the_whole_is_ready_without_those_that_left_before() -> None:
    driver = serving(("nats", "worker", "scheduler"), worker=2)
    assert driver.tell(Wanted("worker", 1)) == [Terminate("worker-2")]
    assert Start("gateway") in driver.tell(ChildExited("worker-2", 0))
    assert driver.tell(ChildReady("gateway"))[-1] == TellAllReady(0.0)


def test_whoever_leaves_while_the_stack_stops_is_asked_twice() -> None:
    driver = serving(worker=2)
    driver.tell(Wanted("worker", 1), StopAsked())
    assert driver.tell(ChildExited("gateway", 0)) == [
        Interrupt("worker"),
        Terminate("worker-2"),
        Interrupt("scheduler"),
    ]
    assert driver.tell(Wanted("worker", 5)) == []

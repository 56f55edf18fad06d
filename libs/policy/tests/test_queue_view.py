"""How long a queue of one class takes, over all schedulers."""

from collections.abc import Mapping

import pytest

from diptych_contracts.fleet import ClassQueue, QueueLoad
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import PriorityClass
from diptych_policy.queue_view import FRESH_S, MAX_SCHEDULERS, Place, QueueView

INTERACTIVE, STANDARD, BATCH = PriorityClass
Queues = Mapping[PriorityClass, tuple[int, float]]


def load(scheduler: str, queues: Queues, queued: int = 0) -> QueueLoad:
    classes = tuple(
        ClassQueue(priority_class=c, waiting=waiting, gap_s=gap_s)
        for c, (waiting, gap_s) in queues.items()
    )
    return QueueLoad(
        scheduler=Incarnation(scheduler), queued=queued, max_queued=100, classes=classes
    )


def view(*loads: QueueLoad) -> QueueView:
    made = QueueView()
    for one in loads:
        made.heard(one, now_s=10.0)
    return made


@pytest.mark.parametrize(
    ("queues", "waits"),
    [
        ({}, [0, 0, 0]),
        ({INTERACTIVE: (0, 5.0)}, [0, 0, 0]),
        ({INTERACTIVE: (4, 0.0)}, [0, 0, 0]),
        ({INTERACTIVE: (4, 2.0)}, [10, 10, 10]),
        ({INTERACTIVE: (4, 2.0), BATCH: (1, 3.0)}, [10, 10, 10]),
        ({INTERACTIVE: (4, 2.0), BATCH: (9, 3.0)}, [10, 10, 30]),
    ],
)
def test_a_class_waits_for_itself_and_those_before_it(queues: Queues, waits: list[float]) -> None:
    made = view(load("s", queues))
    assert [made.wait_s(c, now_s=11.0) for c in PriorityClass] == waits


def test_schedulers_drain_side_by_side() -> None:
    made = view(load("a", {BATCH: (9, 2.0)}), load("b", {BATCH: (10, 2.0)}), load("c", {}))
    assert made.wait_s(BATCH, now_s=11.0) == 20.0


def test_what_was_let_in_since_the_last_report_counts() -> None:
    made = view(load("a", {BATCH: (9, 2.0)}))
    for _ in range(5):
        made.entered(BATCH)
    assert made.wait_s(BATCH, now_s=11.0) == 30.0
    made.heard(load("a", {BATCH: (14, 2.0)}), now_s=11.0)
    assert made.wait_s(BATCH, now_s=11.0) == 30.0


@pytest.mark.parametrize(("queued", "full"), [(99, "batch"), (100, "batch"), (150, "standard")])
def test_each_class_has_its_share_of_all_queues(queued: int, full: str) -> None:
    made = view(load("a", {}, queued=queued), load("b", {}, queued=0))
    assert made.full(BATCH, now_s=11.0) is (queued >= 100)
    assert made.full(STANDARD, now_s=11.0) is (queued >= 150)
    assert made.full(INTERACTIVE, now_s=11.0) is False
    assert view().full(BATCH, now_s=11.0) is False


def test_an_old_report_refuses_nobody() -> None:
    seen = view(load("s1", {INTERACTIVE: (4, 2.0)}, queued=100))
    fresh_s, stale_s = 10.0 + FRESH_S, 10.1 + FRESH_S
    assert seen.full(INTERACTIVE, now_s=fresh_s)
    assert not seen.full(INTERACTIVE, now_s=stale_s)
    assert seen.wait_s(INTERACTIVE, now_s=fresh_s) == 10.0
    assert seen.wait_s(INTERACTIVE, now_s=stale_s) == 0.0


def test_it_does_not_grow_with_every_scheduler_that_ever_was() -> None:
    made = view(*(load(f"s{n}", {}) for n in range(MAX_SCHEDULERS + 50)))
    assert len(made._loads) == MAX_SCHEDULERS


def test_a_place_counts_the_own_class_and_earlier_ones() -> None:
    made = view(load("a", {INTERACTIVE: (2, 1.0), BATCH: (4, 2.0)}), load("b", {BATCH: (3, 2.0)}))
    assert made.place(BATCH, None, now_s=11.0) == Place(position=8, eta_s=7.0, own=6)
    assert made.place(INTERACTIVE, None, now_s=11.0) == Place(position=1, eta_s=2.0, own=1)
    slow = view(load("a", {INTERACTIVE: (9, 3.0), BATCH: (1, 1.0)}))
    assert slow.place(BATCH, None, now_s=11.0) == Place(position=9, eta_s=30.0, own=0)


def test_who_comes_later_does_not_worsen_a_place() -> None:
    made = view(load("a", {BATCH: (4, 2.0)}))
    place = made.place(BATCH, None, now_s=11.0)
    made.heard(load("a", {BATCH: (9, 2.0)}), now_s=11.0)
    assert made.place(BATCH, place, now_s=11.0) == place
    made.heard(load("a", {BATCH: (2, 2.0)}), now_s=11.0)
    assert made.place(BATCH, place, now_s=11.0) == Place(position=1, eta_s=4.0, own=1)


def test_a_place_nobody_knows() -> None:
    made = view(load("a", {BATCH: (4, 0.0)}))
    assert made.place(BATCH, None, now_s=11.0) == Place(position=3, eta_s=None, own=3)
    assert QueueView().place(BATCH, None, now_s=11.0) is None
    assert made.place(BATCH, Place(2, None, 2), now_s=99.0) == Place(2, None, 2)

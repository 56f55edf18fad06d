import pytest

from diptych_bus.cursor import Cursor, Step


@pytest.mark.parametrize(
    ("seq", "previous", "step", "after"),
    [
        (11, 10, Step.DELIVER, 11),
        (15, 10, Step.DELIVER, 15),
        (15, 7, Step.DELIVER, 15),
        (15, 12, Step.GAP, 10),
        (10, 9, Step.SKIP, 10),
        (3, 0, Step.SKIP, 10),
    ],
)
def test_offer(seq: int, previous: int, step: Step, after: int) -> None:
    cursor = Cursor(10)

    assert cursor.offer(seq, previous) is step
    assert cursor.seq == after

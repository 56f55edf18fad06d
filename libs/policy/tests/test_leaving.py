import pytest

from diptych_contracts.ids import Incarnation
from diptych_policy.leaving import may_leave

OTHER = {Incarnation("s2-1")}


@pytest.mark.parametrize(
    ("live", "replicas", "left_s", "leaves"),
    [
        (0, set(), 60.0, True),
        (3, set(), 60.0, False),
        (3, OTHER, 60.0, True),
        (3, set(), 0.0, True),
    ],
)
def test_a_lone_scheduler_finishes_what_is_live(
    live: int, replicas: set[Incarnation], left_s: float, leaves: bool
) -> None:
    assert may_leave(live, replicas, left_s=left_s) is leaves

import pytest

from diptych_bus.verdict import Verdict, verdict
from diptych_contracts.errors import (
    BusAway,
    Conflict,
    DiptychError,
    Expired,
    InvalidRequest,
    Permanent,
    Refused,
    Transient,
    Unverified,
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, Verdict.ACK),
        (Transient(), Verdict.NAK),
        (BusAway(), Verdict.NAK),
        (Conflict(), Verdict.NAK),
        (Refused("no_room"), Verdict.NAK),
        (Unverified(), Verdict.NAK),
        (Permanent(), Verdict.FAIL),
        (InvalidRequest("x"), Verdict.FAIL),
        (Expired(), Verdict.DROP),
    ],
)
def test_each_error_has_one_verdict(error: DiptychError | None, expected: Verdict) -> None:
    assert verdict(error) is expected


def test_the_last_try_is_dead() -> None:
    assert verdict(Transient(), num_delivered=4, max_deliver=5) is Verdict.NAK
    assert verdict(Transient(), num_delivered=5, max_deliver=5) is Verdict.DEAD
    assert verdict(Permanent(), num_delivered=5, max_deliver=5) is Verdict.FAIL


def test_a_bug_is_raised() -> None:
    with pytest.raises(KeyError):
        verdict(KeyError("x"))

import pytest

from diptych_contracts import errors
from diptych_contracts.errors import DiptychError, InvalidRequest, Permanent, Refused, Transient


@pytest.mark.parametrize(
    ("kind", "receiver_does"),
    [
        (errors.BusAway, Transient),
        (errors.InvalidRequest, Permanent),
        (errors.UnknownModel, InvalidRequest),
        (errors.ContextOverflow, InvalidRequest),
        (errors.Incompatible, Permanent),
        (errors.Conflict, DiptychError),
        (errors.Refused, DiptychError),
        (errors.Unverified, DiptychError),
        (errors.Expired, DiptychError),
    ],
)
def test_each_error_stands_where_its_receiver_looks(
    kind: type[DiptychError], receiver_does: type[DiptychError]
) -> None:
    assert issubclass(kind, receiver_does)
    both = issubclass(kind, Transient) and issubclass(kind, Permanent)
    assert not both


def test_an_invalid_request_names_its_parameter() -> None:
    error = InvalidRequest("expected 0 to 2, got 3", param="temperature", code="out_of_range")
    assert str(error) == "expected 0 to 2, got 3"
    assert (error.param, error.code) == ("temperature", "out_of_range")
    assert (InvalidRequest("no").param, InvalidRequest("no").code) == (None, None)


def test_a_refusal_says_why() -> None:
    assert str(Refused("no_room", "3 of 3 slots used")) == "no_room: 3 of 3 slots used"
    assert str(Refused("draining")) == "draining"
    assert Refused("draining").reason == "draining"
